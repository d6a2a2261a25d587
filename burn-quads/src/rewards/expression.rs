//! Short mathematical expressions, evaluated while they are read: exactly where they are fractions, and at a few sample
//! points for their variables.
use super::rational::Rational;

/// Where the variables are sampled.
const SAMPLES: usize = 3;
/// Nesting beyond which an expression is not read.
const MAX_DEPTH: usize = 40;
/// Letters that may stand side by side as a product; longer words of other letters are text.
const VARIABLES: &str = "abcknpqrtxyz";
/// Letters of another alphabet that are variables too.
const GREEK: [&str; 12] = [
    "\\alpha",
    "\\beta",
    "\\gamma",
    "\\delta",
    "\\epsilon",
    "\\theta",
    "\\lambda",
    "\\mu",
    "\\rho",
    "\\sigma",
    "\\phi",
    "\\omega",
];

/// Functions of one number.
const FUNCTIONS: [(&str, Function); 5] = [
    ("\\sin", f64::sin),
    ("\\cos", f64::cos),
    ("\\tan", f64::tan),
    ("\\ln", f64::ln),
    ("\\log", f64::log10),
];

type Function = fn(f64) -> f64;

/// What an expression is worth.
#[derive(Clone, Copy, Debug)]
pub(super) struct Value {
    /// The number, if the expression is a fraction of integers within reach.
    exact: Option<Rational>,
    /// Its value at the sample points.
    samples: [f64; SAMPLES],
    /// Bit `c` is set when letter `a + c` occurs; upper case from bit 26 on, [`GREEK`] from bit 52 on.
    variables: u64,
    /// Whether no sum or product of plain numbers is left to be worked out.
    worked_out: bool,
    /// A literal, which can be the whole part of a mixed number.
    literal: bool,
}

impl Value {
    fn number(value: Rational) -> Self {
        Self {
            exact: Some(value),
            samples: [value.to_f64(); SAMPLES],
            variables: 0,
            worked_out: true,
            literal: false,
        }
    }

    fn constant(value: f64) -> Self {
        Self {
            exact: None,
            ..Self::number(Rational::integer(0)).sampled(|_| value)
        }
    }

    fn letter(letter: char) -> Self {
        Self::variable(match letter {
            'a'..='z' => letter as u32 - 'a' as u32,
            _ => letter as u32 - 'A' as u32 + 26,
        })
    }

    fn variable(bit: u32) -> Self {
        // Numbers without a pattern, between 0.5 and 2.5.
        let sample =
            |i: usize| 0.5 + 2.0 * (f64::from(bit + 1) * 0.618_033_988_75 + i as f64 * 0.324_717_957_24).fract();
        Self {
            exact: None,
            samples: std::array::from_fn(sample),
            variables: 1 << bit,
            worked_out: true,
            literal: false,
        }
    }

    fn sampled(self, f: impl Fn(f64) -> f64) -> Self {
        Self {
            samples: self.samples.map(f),
            ..self
        }
    }

    fn combined(self, other: Self, exact: Option<Rational>, f: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            exact,
            samples: std::array::from_fn(|i| f(self.samples[i], other.samples[i])),
            variables: self.variables | other.variables,
            worked_out: self.worked_out && other.worked_out,
            literal: false,
        }
    }

    fn both(self, other: Self, f: impl Fn(Rational, Rational) -> Option<Rational>) -> Option<Rational> {
        f(self.exact?, other.exact?)
    }

    fn plus(self, other: Self) -> Self {
        let sum = self.combined(other, self.both(other, Rational::add), |a, b| a + b);
        let numbers = self.exact.is_some() && other.exact.is_some();
        Self {
            worked_out: sum.worked_out && !numbers,
            ..sum
        }
    }

    fn negated(self) -> Self {
        Self {
            exact: self.exact.map(Rational::negated),
            literal: false,
            ..self.sampled(|a| -a)
        }
    }

    /// `scientific` when the second factor is a power of ten, which belongs to the number.
    fn times(self, other: Self, scientific: bool) -> Self {
        let product = self.combined(other, self.both(other, Rational::mul), |a, b| a * b);
        let numbers = self.exact.is_some() && other.exact.is_some();
        Self {
            worked_out: product.worked_out && (scientific || !numbers),
            ..product
        }
    }

    fn over(self, other: Self) -> Self {
        let quotient = self.both(other, |a, b| a.mul(b.inverse()?));
        self.combined(other, quotient, |a, b| a / b)
    }

    fn to_the(self, exponent: Self) -> Self {
        let power = self.both(exponent, Rational::pow);
        let root = || {
            self.both(exponent, |a, b| {
                (Rational::integer(2).mul(b)? == Rational::integer(1)).then(|| a.sqrt())?
            })
        };
        self.combined(exponent, power.or_else(root), f64::powf)
    }

    fn square_root(self) -> Self {
        Self {
            exact: self.exact.and_then(Rational::sqrt),
            literal: false,
            ..self.sampled(f64::sqrt)
        }
    }

    /// The number times ten to the power of `zeros`, as a word says it: no product that is left to be worked out.
    pub(super) fn with_zeros(self, zeros: u32) -> Option<Self> {
        let power = Rational::integer(10i128.checked_pow(zeros)?);
        let value = Self::number(self.exact?.mul(power)?);
        Some(Self {
            worked_out: self.worked_out,
            ..value
        })
    }

    /// The number, if it is one.
    pub(super) fn number_value(&self) -> Option<Rational> {
        self.exact
    }

    /// Whether `self`, an answer, is worth the same as `reference`.
    pub(super) fn answers(&self, reference: &Self) -> bool {
        match (self.exact, reference.exact) {
            (Some(a), Some(b)) => a == b && self.worked_out,
            (None, None) => {
                self.variables == reference.variables
                    && self.samples.iter().zip(&reference.samples).all(|(a, b)| {
                        a.is_finite()
                            && b.is_finite()
                            && (a - b).abs() <= 1e-9 * (1.0f64).max(a.abs()).min(b.abs().max(1e-9))
                    })
            }
            _ => false,
        }
    }
}

/// Reads the whole of `text`, or gives `None`.
pub(super) fn evaluate(text: &str) -> Option<Value> {
    let mut reader = Reader { rest: text, depth: 0 };
    let value = reader.sum()?;
    reader.skip_space();
    reader.rest.is_empty().then_some(value)
}

struct Reader<'a> {
    rest: &'a str,
    depth: usize,
}

impl Reader<'_> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn peek(&mut self) -> Option<char> {
        self.skip_space();
        self.rest.chars().next()
    }

    fn take(&mut self, token: &str) -> bool {
        self.skip_space();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// A command, whose name ends where letters end.
    fn command(&mut self, name: &str) -> bool {
        self.skip_space();
        match self.rest.strip_prefix(name) {
            Some(rest) if !rest.starts_with(|c: char| c.is_ascii_alphabetic()) => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    fn sum(&mut self) -> Option<Value> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let mut value = self.product()?;
        loop {
            if self.take("+") {
                value = value.plus(self.product()?);
            } else if self.take("-") {
                value = value.plus(self.product()?.negated());
            } else {
                self.depth -= 1;
                return Some(value);
            }
        }
    }

    fn product(&mut self) -> Option<Value> {
        let mut value = self.signed()?;
        loop {
            if self.take("*") {
                self.skip_space();
                let scientific = value.exact.is_some() && is_power_of_ten(self.rest);
                value = value.times(self.signed()?, scientific);
            } else if self.take("/") {
                value = value.over(self.signed()?);
            } else if self.starts_factor() {
                value = value.times(self.power()?, false);
            } else {
                return Some(value);
            }
        }
    }

    /// Whether a factor follows without a sign between.
    fn starts_factor(&mut self) -> bool {
        match self.peek() {
            Some('\\') => {
                let functions = FUNCTIONS.iter().map(|(name, _)| name);
                let mut names = ["\\frac", "\\sqrt", "\\pi"].iter().chain(&GREEK).chain(functions);
                names.any(|name| self.rest.starts_with(name))
            }
            Some(c) => c == '(' || c == '{' || c.is_ascii_alphabetic(),
            None => false,
        }
    }

    fn signed(&mut self) -> Option<Value> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let value = if self.take("-") {
            self.signed()?.negated()
        } else if self.take("+") {
            self.signed()?
        } else {
            self.mixed()?
        };
        self.depth -= 1;
        Some(value)
    }

    /// `1\frac{1}{2}` is a number, not a product.
    fn mixed(&mut self) -> Option<Value> {
        let value = self.power()?;
        let whole = value.exact.filter(|whole| value.literal && whole.is_integer());
        match (whole, self.peek()) {
            (Some(whole), Some('\\')) if self.rest.starts_with("\\frac") => {
                let part = self.power()?;
                match part.exact {
                    Some(part) => Some(Value::number(whole.add(part)?)),
                    None => Some(value.times(part, false)),
                }
            }
            _ => Some(value),
        }
    }

    fn power(&mut self) -> Option<Value> {
        let base = self.primary()?;
        if !self.take("^") {
            return Some(base);
        }
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let exponent = match self.peek()? {
            '-' => self.signed()?,
            _ => self.power()?,
        };
        self.depth -= 1;
        Some(base.to_the(exponent))
    }

    fn primary(&mut self) -> Option<Value> {
        let first = self.peek()?;
        if first.is_ascii_digit() || first == '.' {
            return self.number();
        }
        match first {
            '(' => self.enclosed("(", ")"),
            '{' => self.enclosed("{", "}"),
            '\\' => self.named(),
            c if c.is_ascii_alphabetic() => self.letters(),
            _ => None,
        }
    }

    fn enclosed(&mut self, open: &str, close: &str) -> Option<Value> {
        self.take(open).then_some(())?;
        let value = self.sum()?;
        self.take(close).then_some(Value {
            literal: false,
            ..value
        })
    }

    fn number(&mut self) -> Option<Value> {
        let end = self
            .rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        let value = Rational::decimal(digits)?;
        self.rest = rest;
        // 1.5e3, but not 2e or 2ex.
        let exponent = rest.strip_prefix(['e', 'E']).map(|rest| {
            let sign = rest.len() - rest.trim_start_matches(['+', '-']).len();
            let digits = rest[sign..]
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(rest.len() - sign);
            rest.split_at(sign + digits)
        });
        if let Some((exponent, after)) = exponent
            && let Ok(exponent) = exponent.parse::<i32>()
        {
            self.rest = after;
            let power = Rational::integer(10).pow(Rational::integer(exponent.into()))?;
            return Some(Value::number(value.mul(power)?));
        }
        Some(Value {
            literal: true,
            ..Value::number(value)
        })
    }

    fn letters(&mut self) -> Option<Value> {
        let end = self
            .rest
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        if word.len() > 1 && !word.chars().all(|c| VARIABLES.contains(c)) {
            return match word {
                "pi" => {
                    self.rest = rest;
                    Some(Value::constant(std::f64::consts::PI))
                }
                "sqrt" => {
                    self.rest = rest;
                    Some(self.enclosed("(", ")")?.square_root())
                }
                _ => None,
            };
        }
        let letter = word.chars().next()?;
        self.rest = &self.rest[1..];
        Some(Value::letter(letter))
    }

    /// An argument: braces, or one digit, letter or command.
    fn argument(&mut self) -> Option<Value> {
        match self.peek()? {
            c if c.is_ascii_digit() => {
                self.rest = &self.rest[1..];
                let digit = c.to_digit(10)?;
                Some(Value::number(Rational::integer(digit.into())))
            }
            _ => self.primary(),
        }
    }

    fn named(&mut self) -> Option<Value> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let value = if self.command("\\frac") {
            let numerator = self.argument()?;
            numerator.over(self.argument()?)
        } else if self.command("\\sqrt") {
            if self.take("[") {
                let degree = self.sum()?;
                self.take("]").then_some(())?;
                let one = Value::number(Rational::integer(1));
                self.argument()?.to_the(one.over(degree))
            } else {
                self.argument()?.square_root()
            }
        } else if self.command("\\pi") {
            Value::constant(std::f64::consts::PI)
        } else if let Some(letter) = GREEK.iter().position(|name| self.command(name)) {
            Value::variable(52 + letter as u32)
        } else {
            let (_, f) = FUNCTIONS.into_iter().find(|(name, _)| self.command(name))?;
            let value = self.argument_of_function()?;
            Value {
                exact: None,
                literal: false,
                ..value.sampled(f)
            }
        };
        self.depth -= 1;
        Some(value)
    }

    fn argument_of_function(&mut self) -> Option<Value> {
        match self.peek()? {
            '(' => self.enclosed("(", ")"),
            _ => self.power(),
        }
    }
}

/// Whether `10^…` follows, and nothing that would turn its base into another number.
fn is_power_of_ten(text: &str) -> bool {
    text.strip_prefix("10")
        .is_some_and(|rest| rest.trim_start().starts_with('^'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn equal(a: &str, b: &str) -> bool {
        match (evaluate(a), evaluate(b)) {
            (Some(a), Some(b)) => a.answers(&b),
            _ => panic!("{a} or {b} was not read"),
        }
    }

    #[test]
    fn numbers_are_exact() {
        for (a, b) in [
            ("0.5", "\\frac{1}{2}"),
            ("1/2", "\\frac12"),
            ("1\\frac{1}{2}", "\\frac{3}{2}"),
            ("-1\\frac{1}{2}", "-\\frac{3}{2}"),
            ("1.2*10^3", "1200"),
            ("1.2e3", "1200"),
            ("2^{10}", "1024"),
            ("\\sqrt{16}", "4"),
            ("004", "4"),
            ("2^{-1}", "0.5"),
            ("4^{1/2}", "2"),
        ] {
            assert!(equal(a, b), "{a} = {b}");
        }
        for (a, b) in [
            ("0.333", "1/3"),
            ("-3", "3"),
            ("\\frac13", "\\frac12"),
            ("3.14159265", "\\pi"),
        ] {
            assert!(!equal(a, b), "{a} = {b}");
        }
    }

    #[test]
    fn what_is_left_to_be_worked_out_is_no_number() {
        for answer in ["2+2", "2*2", "8-4", "(2)(2)", "1+\\frac{6}{2}"] {
            assert!(!equal(answer, "4"), "{answer}");
        }
        assert!(equal("4", "2+2"), "the reference may be a sum");
    }

    #[test]
    fn algebra_does_not_matter() {
        for (a, b) in [
            ("2x+1", "1+2x"),
            ("(x+1)^2", "x^2+2x+1"),
            ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}"),
            ("\\frac{x}{2}", "0.5x"),
            ("2\\pi", "\\pi*2"),
            ("xy", "yx"),
            ("\\alpha+1", "1+\\alpha"),
            ("2\\theta\\lambda", "\\lambda*2\\theta"),
            ("\\sin\\alpha", "\\sin(\\alpha)"),
            ("p^2-pq", "p(p-q)"),
            ("\\sqrt[3]{2}", "2^{\\frac{1}{3}}"),
        ] {
            assert!(equal(a, b), "{a} = {b}");
        }
        for (a, b) in [
            ("2x", "2y"),
            ("x^2", "x"),
            ("\\alpha", "\\beta"),
            ("\\alpha", "a"),
            ("\\omega", "z"),
            ("p^2-pq", "p(q-p)"),
            ("\\sqrt{2}", "\\sqrt{3}"),
            ("x-x+1", "y-y+1"),
        ] {
            assert!(!equal(a, b), "{a} = {b}");
        }
    }

    #[test]
    fn words_are_not_read() {
        for text in [
            "no",
            "cat dog",
            "",
            "+",
            "1..2",
            "((",
            "x_1",
            "5!",
            "\\foo",
            "1 2",
            "2,3",
            "\\frac{1}",
        ] {
            assert!(evaluate(text).is_none(), "{text}");
        }
    }

    #[test]
    fn towers_and_nests_end() {
        assert!(!equal("9^{9^{9^9}}", "1"));
        assert!(!equal("9^{9^{9^9}}", "9^{9^{9^8}}"), "infinite on both sides");
        for nest in ["(", "-", "{", "\\sqrt", "2^", "\\frac", "\\sin("] {
            assert!(evaluate(&nest.repeat(10_000)).is_none());
        }
    }
}
