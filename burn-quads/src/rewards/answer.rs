//! Whether two answers are the same.
use super::{
    expression::{Value, evaluate},
    latex::plain,
};

/// Longer answers are compared as text only.
const MAX_LENGTH: usize = 400;
/// And longer ones as they are, LaTeX and all.
const MAX_LATEX_LENGTH: usize = 4 * MAX_LENGTH;
/// Nesting beyond which brackets are compared as text.
const MAX_DEPTH: usize = 8;

/// Whether `answer` says the same as `reference`. The rules are those of the [module](super); they favour the reference: an
/// answer may leave out what the reference has (units, the left side of an equation), and must have worked out what the
/// reference has.
pub fn same_answer(answer: &str, reference: &str) -> bool {
    if answer.len().max(reference.len()) > MAX_LATEX_LENGTH {
        return same_text(answer, reference);
    }
    let (answer, reference) = (plain(answer), plain(reference));
    if answer.is_empty() || reference.is_empty() {
        return false;
    }
    same_text(&answer, &reference)
        || (answer.len() <= MAX_LENGTH && reference.len() <= MAX_LENGTH && same(&answer, &reference, 0))
}

/// Equal but for white space, case, quotation marks and brackets around one letter (a choice).
fn same_text(a: &str, b: &str) -> bool {
    fn key(text: &str) -> String {
        let text = text.replace('"', "");
        let mut inside = text.trim();
        if let Some(letter) = inside.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'))
            && letter.trim().chars().count() == 1
            && letter.trim().chars().all(char::is_alphabetic)
        {
            inside = letter;
        }
        let mut key = String::with_capacity(inside.len());
        let mut blank = false;
        for c in inside.chars() {
            if c.is_whitespace() {
                blank = true;
                continue;
            }
            // 1 1/2 is not 11/2.
            if blank && c.is_ascii_digit() && key.ends_with(|c: char| c.is_ascii_digit()) {
                key.push(' ');
            }
            blank = false;
            key.extend(c.to_lowercase());
        }
        without_single_braces(&key)
    }
    key(a) == key(b)
}

/// `x_{2}` to `x_2`: TeX needs no braces around one character.
fn without_single_braces(text: &str) -> String {
    let characters: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < characters.len() {
        match characters[at..] {
            ['{', c, '}', ..] if c != '{' && c != '}' => {
                out.push(c);
                at += 3;
            }
            [c, ..] => {
                out.push(c);
                at += 1;
            }
            [] => break,
        }
    }
    out
}

fn same(answer: &str, reference: &str, depth: usize) -> bool {
    if depth > MAX_DEPTH {
        return false;
    }
    let (answer, reference) = without_left_side(answer, reference);
    let (answer, reference) = (without_thousands(answer), without_thousands(reference));
    match (Shape::of(&answer), Shape::of(&reference)) {
        (Shape::Single(answer), Shape::Single(reference)) => same_single(answer, reference),
        (Shape::Brackets(a), Shape::Brackets(b)) => {
            a.open == b.open && a.close == b.close && {
                match a.open {
                    '{' => same_unordered(&a.items, &b.items, depth),
                    _ => same_ordered(&a.items, &b.items, depth),
                }
            }
        }
        (Shape::List(a), Shape::List(b)) => same_unordered(&a, &b, depth),
        (Shape::Union(a), Shape::Union(b)) => same_unordered(&a, &b, depth),
        _ => false,
    }
}

fn same_item(answer: &str, reference: &str, depth: usize) -> bool {
    same_text(answer, reference) || same(answer.trim(), reference.trim(), depth + 1)
}

fn same_ordered(a: &[&str], b: &[&str], depth: usize) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_item(a, b, depth))
}

/// Each item of `a` takes one of `b`.
fn same_unordered(a: &[&str], b: &[&str], depth: usize) -> bool {
    let mut left: Vec<&str> = b.to_vec();
    a.len() == b.len()
        && a.iter()
            .all(|a| match left.iter().position(|b| same_item(a, b, depth)) {
                Some(at) => {
                    left.swap_remove(at);
                    true
                }
                None => false,
            })
}

/// One thing: an expression, a number with a unit, or text.
fn same_single(answer: &str, reference: &str) -> bool {
    if same_text(answer, reference) {
        return true;
    }
    // A word has an order of its letters, a product has none.
    if [answer, reference].iter().all(|text| is_word(text)) {
        return false;
    }
    let mixed = [answer, reference].map(|text| mixed_number(without_gloss(unquoted(text))));
    let [answer, reference] = [&mixed[0], &mixed[1]].map(String::as_str);
    if let (Some(a), Some(b)) = (evaluate(answer), evaluate(reference))
        && a.answers(&b)
    {
        return true;
    }
    match (Quantity::of(answer), Quantity::of(reference)) {
        (Some(a), Some(b)) => {
            let units = a.unit.is_empty() || b.unit.is_empty() || same_text(a.unit, b.unit);
            units && a.value.answers(&b.value)
        }
        _ => false,
    }
}

/// Three or more letters and nothing else. Two may be a product: xy.
fn is_word(text: &str) -> bool {
    text.chars().count() > 2 && text.chars().all(char::is_alphabetic)
}

/// `12 (twelve)` to `12`: the same number in words behind it says nothing else.
fn without_gloss(text: &str) -> &str {
    let parts = || {
        let (number, words) = text.strip_suffix(')')?.rsplit_once('(')?;
        let number = number.trim_end();
        let spelled = in_words(number.parse().ok()?)?;
        (words.trim().replace(' ', "-").eq_ignore_ascii_case(&spelled)).then_some(number)
    };
    parts().unwrap_or(text)
}

/// Numbers below a hundred, in English.
fn in_words(number: usize) -> Option<String> {
    const SMALL: [&str; 20] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    const TENS: [&str; 8] = [
        "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
    ];
    if let Some(word) = SMALL.get(number) {
        return Some(word.to_string());
    }
    let tens = TENS.get(number / 10 - 2)?;
    Some(match number % 10 {
        0 => tens.to_string(),
        ones => format!("{tens}-{}", SMALL[ones]),
    })
}

/// All of it in one pair of quotation marks, without them.
fn unquoted(text: &str) -> &str {
    let inside = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    inside.filter(|inside| !inside.contains('"')).map_or(text, str::trim)
}

/// `1 1/2` to `1\frac{1}{2}`.
fn mixed_number(text: &str) -> String {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text
        .split_once(' ')
        .and_then(|(whole, part)| Some((whole, part.split_once('/')?)))
    {
        Some((whole, (numerator, denominator)))
            if digits(whole.trim_start_matches('-')) && digits(numerator) && digits(denominator) =>
        {
            format!("{whole}\\frac{{{numerator}}}{{{denominator}}}")
        }
        _ => text.to_string(),
    }
}

/// A number and its unit, which may be empty.
struct Quantity<'a> {
    value: Value,
    unit: &'a str,
}

impl<'a> Quantity<'a> {
    fn of(text: &'a str) -> Option<Self> {
        let number = |text: &str| evaluate(text).filter(|value| value.number_value().is_some());
        if let Some(value) = number(text) {
            return Some(Self { value, unit: "" });
        }
        // 5m is a product, 5 m a length.
        let expression = evaluate(text).is_some();
        // The unit starts at the first quotation mark, or at the first letter that belongs to no command.
        let mut start = None;
        let mut command = false;
        for (at, c) in text.char_indices() {
            match c {
                '\\' => command = true,
                '"' => start = Some(at),
                c if c.is_alphabetic() && !command => start = Some(at),
                c if !c.is_alphabetic() => command = false,
                _ => {}
            }
            if start.is_some() {
                break;
            }
        }
        let (value, unit) = text.split_at(start?);
        let value = number(value.trim())?;
        let separate = !expression || text[..start?].ends_with(' ');
        let (value, unit) = large(value, unit);
        (separate && is_unit(unit)).then_some(Self { value, unit })
    }
}

/// Words that make a number so many times larger.
const LARGE: [(&str, u32); 4] = [("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12)];

/// `7` and `million dollars` to `7000000` and `dollars`.
fn large(value: Value, unit: &str) -> (Value, &str) {
    let words = unit.trim_matches(['"', ' ']);
    let factor = LARGE.iter().find_map(|(name, zeros)| {
        let rest = words.strip_prefix(name)?;
        let whole_word = !rest.starts_with(|c: char| c.is_alphanumeric());
        Some((value.with_zeros(*zeros)?, rest.trim_matches(['"', ' ']))).filter(|_| whole_word)
    });
    factor.unwrap_or((value, unit))
}

/// Words that change the number, or say something about it; in the plural too.
const NO_UNITS: [&str; 30] = [
    "hundred",
    "thousand",
    "million",
    "billion",
    "trillion",
    "dozen",
    "half",
    "pi",
    "times",
    "plus",
    "minus",
    "over",
    "squared",
    "cubed",
    "or",
    "and",
    "but",
    "is",
    "was",
    "not",
    "no",
    "wrong",
    "maybe",
    "because",
    "third",
    "fifth",
    "tenth",
    "hundredth",
    "thousandth",
    "millionth",
];
/// Single letters that are units; others are variables.
const LETTER_UNITS: &str = "mgshlLAVWJNKCF";
/// Words of the longest unit: "miles per hour", "square feet of land".
const MOST_WORDS: usize = 4;

/// A few words without numbers, but for exponents as in cm^2.
fn is_unit(text: &str) -> bool {
    let words = || text.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty());
    let variable = |word: &str| word.len() == 1 && !LETTER_UNITS.contains(word);
    let says_more = |word: &str| {
        let lower = word.to_lowercase();
        let is = |no: &&str| lower == **no || lower.strip_suffix('s') == Some(*no);
        variable(word) || NO_UNITS.iter().any(is)
    };
    if words().count() > MOST_WORDS || words().any(says_more) {
        return false;
    }
    let mut before = ' ';
    text.chars().all(|c| {
        let fits = c.is_alphabetic()
            || " \"./^{}-'".contains(c)
            || (c.is_ascii_digit() && (before == '^' || before == '{' || before == '-'));
        before = c;
        fits
    })
}

/// `x = 5` to `5`, unless the reference is an equation too.
fn without_left_side<'a>(answer: &'a str, reference: &'a str) -> (&'a str, &'a str) {
    fn right(text: &str) -> Option<&str> {
        let (left, right) = match text.split_once("\\in") {
            Some((left, set)) if set.trim_start().starts_with(['[', '(']) => (left, set),
            _ => text.split_once('=')?,
        };
        (is_name(left.trim()) && !right.contains('=')).then(|| right.trim())
    }
    /// `x`, `x_1`, `f(x)`, `area`; not `2x`, `x^2` or `xy`.
    fn is_name(text: &str) -> bool {
        let letters = text.find(|c: char| !c.is_alphabetic()).unwrap_or(text.len());
        let (name, rest) = text.split_at(letters);
        let word = name.chars().count() == 1 || (name.len() > 1 && evaluate(name).is_none());
        let subscript = rest
            .strip_prefix('_')
            .is_some_and(|rest| rest.len() <= 5 && !rest.contains('('));
        let argument = rest.starts_with('(') && rest.ends_with(')') && rest.len() <= 5;
        word && (rest.is_empty() || rest == "'" || subscript || argument)
    }
    match (right(answer), right(reference)) {
        (Some(right), None) => (right, reference),
        (None, Some(right)) => (answer, right),
        (Some(a), Some(b))
            if same_text(
                answer.split('=').next().unwrap_or(""),
                reference.split('=').next().unwrap_or(""),
            ) =>
        {
            (a, b)
        }
        _ => (answer, reference),
    }
}

/// `1,234,567` and `1 234 567` to `1234567`, wherever they stand outside brackets.
fn without_thousands(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if !((c == ',' || c == ' ') && depth == 0 && separates_thousands(bytes, at)) {
            out.push(c);
        }
    }
    out
}

/// Whether one to three digits stand before `at`, after another separator or nothing numeric, and exactly three behind it.
fn separates_thousands(text: &[u8], at: usize) -> bool {
    let digits_before = text[..at].iter().rev().take_while(|b| b.is_ascii_digit()).count();
    let digits_after = text[at + 1..].iter().take_while(|b| b.is_ascii_digit()).count();
    let before = text[..at - digits_before].last();
    let grouped = match before {
        // In the middle of a number, groups have three digits.
        Some(b) if *b == text[at] => digits_before == 3 || digits_before == 0,
        Some(b'.') => false,
        _ => true,
    };
    (1..=3).contains(&digits_before) && digits_after == 3 && grouped
}

/// How an answer is built.
enum Shape<'a> {
    Single(&'a str),
    Brackets(Brackets<'a>),
    List(Vec<&'a str>),
    Union(Vec<&'a str>),
}

struct Brackets<'a> {
    open: char,
    close: char,
    items: Vec<&'a str>,
}

impl<'a> Shape<'a> {
    fn of(text: &'a str) -> Self {
        let text = text.trim();
        let union = split(text, |rest| {
            ["\\cup", "∪"]
                .iter()
                .find(|name| rest.starts_with(**name))
                .map_or(0, |name| name.len())
        });
        if union.len() > 1 {
            return Self::Union(union);
        }
        let comma = |rest: &str| usize::from(rest.starts_with([',', ';']));
        let listed = split(text, |rest| match rest {
            _ if rest.starts_with(" or ") || rest.starts_with(" and ") => rest[1..].find(' ').map_or(0, |n| n + 2),
            _ => comma(rest),
        });
        if listed.len() > 1 {
            return Self::List(listed);
        }
        match Brackets::of(text, comma) {
            Some(brackets) => Self::Brackets(brackets),
            None => Self::Single(text),
        }
    }
}

impl<'a> Brackets<'a> {
    /// `(a, b]`, `[a, b)`, `\{a, b\}`: at least two items, but for sets.
    fn of(text: &'a str, comma: impl Fn(&str) -> usize) -> Option<Self> {
        if let Some(inside) = text.strip_prefix("\\{").and_then(|rest| rest.strip_suffix("\\}")) {
            let items = split(inside, comma);
            return Some(Self {
                open: '{',
                close: '}',
                items,
            });
        }
        let (open, close) = (text.chars().next()?, text.chars().last()?);
        if !"([".contains(open) || !")]".contains(close) || text.len() < 2 {
            return None;
        }
        let items = split(&text[1..text.len() - 1], comma);
        (items.len() > 1).then_some(Self { open, close, items })
    }
}

/// Parts of `text` between separators outside brackets; `separator` gives the length of one at the start of its argument.
fn split(text: &str, separator: impl Fn(&str) -> usize) -> Vec<&str> {
    let (mut parts, mut start, mut depth, mut skip) = (vec![], 0, 0usize, 0);
    for (at, c) in text.char_indices() {
        if at < skip {
            continue;
        }
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        let length = if depth == 0 { separator(&text[at..]) } else { 0 };
        if length > 0 {
            parts.push(text[start..at].trim());
            start = at + length;
            skip = start;
        }
    }
    parts.push(text[start..].trim());
    parts
}
