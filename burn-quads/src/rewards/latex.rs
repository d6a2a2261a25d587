//! LaTeX and typography, reduced to plain mathematical text.

/// What is taken out, and what is put in its place. Longer commands come before those that they start with.
const REPLACEMENTS: &[(&str, &str)] = &[
    // A row's end in a matrix, before the commands that begin with one backslash.
    ("\\\\", ROW_END),
    ("\\displaystyle", ""),
    (",\\! ", ","),
    ("\\qquad", " "),
    ("\\quad", " "),
    ("\\,", ""),
    ("\\!", ""),
    ("\\;", " "),
    ("\\:", " "),
    ("\\ ", " "),
    ("~", " "),
    ("\u{a0}", " "),
    ("{,}", ","),
    ("\\(", ""),
    ("\\)", ""),
    ("\\[", ""),
    ("\\]", ""),
    ("\\left", ""),
    ("\\right", ""),
    ("\\leqslant", "≤"),
    ("\\leq", "≤"),
    ("\\le", "≤"),
    ("\\geqslant", "≥"),
    ("\\geq", "≥"),
    ("\\ge", "≥"),
    ("\\$", ""),
    ("$", ""),
    ("€", ""),
    ("£", ""),
    ("\\%", ""),
    ("%", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\degree", ""),
    ("°", ""),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("\\times", "*"),
    ("\\cdot", "*"),
    ("×", "*"),
    ("·", "*"),
    ("\\div", "/"),
    ("÷", "/"),
    ("−", "-"),
    ("–", "-"),
    ("π", "\\pi "),
    ("∞", "\\infty "),
    ("√", "\\sqrt"),
    ("²", "^2"),
    ("³", "^3"),
    ("½", "\\frac12"),
    ("¼", "\\frac14"),
    ("¾", "\\frac34"),
    ("**", ""),
];

/// What stands for the end of a matrix's row.
const ROW_END: &str = "\u{1}";

/// Commands whose argument is text: it is put between quotation marks.
const TEXT: &[&str] = &[
    "\\text",
    "\\textbf",
    "\\textit",
    "\\mathrm",
    "\\mathbf",
    "\\mbox",
    "\\operatorname",
];

/// `text` in plain characters: no dollar signs, spacing, currency, percent and degree signs; quoted words; one spelling for
/// each operator; no full stop at the end.
pub(super) fn plain(text: &str) -> String {
    let mut text = text.trim();
    while let Some(inside) = ["\\boxed{", "\\fbox{"]
        .iter()
        .find_map(|open| text.strip_prefix(open)?.strip_suffix('}'))
    {
        text = inside.trim();
    }
    let mut out = quoted(text);
    for (from, to) in REPLACEMENTS {
        if out.contains(from) {
            out = out.replace(from, to);
        }
    }
    let out = out.trim();
    let out = out.strip_suffix('.').unwrap_or(out);
    out.trim().to_string()
}

/// `\text{ cm}` to `" cm"`. A command without a closed argument stays.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let name = rest[1..]
            .find(|c: char| !c.is_ascii_alphabetic())
            .map_or(rest.len(), |n| n + 1);
        let argument = TEXT
            .contains(&&rest[..name])
            .then(|| rest[name..].trim_start().strip_prefix('{'))
            .flatten()
            .and_then(|argument| argument.split_once('}'))
            .filter(|(inside, _)| !inside.contains(['{', '"']));
        match argument {
            Some((inside, after)) => {
                out.extend(['"']);
                out.push_str(inside);
                out.extend(['"']);
                rest = after;
            }
            None => {
                out.push('\\');
                rest = &rest[1..];
                // The character behind a backslash belongs to it: `\\text` is a line break and a word.
                if let Some(next) = rest.chars().next().filter(|c| !c.is_ascii_alphabetic()) {
                    out.push(next);
                    rest = &rest[next.len_utf8()..];
                }
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typography_goes() {
        for (latex, expected) in [
            ("$1{,}250$", "1,250"),
            ("1\\,000", "1000"),
            ("\\$1,250.", "1,250"),
            ("45^\\circ", "45"),
            ("25\\%", "25"),
            ("12\\text{ cm}", "12\" cm\""),
            ("\\left(-\\infty, 2\\right]", "(-\\infty, 2]"),
            ("\\dfrac{1}{2}", "\\frac{1}{2}"),
            ("3 \\times 10^4", "3 * 10^4"),
            ("\\text{a", "\\text{a"),
            ("\\\\text{a}", "\u{1}text{a}"),
            ("1 \\\\ 2", "1 \u{1} 2"),
            ("11,\\! 111", "11,111"),
            ("\\boxed{4}", "4"),
            ("x \\le 3", "x ≤ 3"),
            ("\\", "\\"),
        ] {
            assert_eq!(plain(latex), expected, "{latex}");
        }
    }
}
