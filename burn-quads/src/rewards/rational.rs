//! Exact fractions, as far as 128 bits reach.

/// A fraction in lowest terms; the denominator is positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rational {
    numerator: i128,
    denominator: i128,
}

impl Rational {
    pub(super) fn integer(value: i128) -> Self {
        Self {
            numerator: value,
            denominator: 1,
        }
    }

    /// `None` for a zero denominator, or where 128 bits do not reach.
    pub(super) fn new(numerator: i128, denominator: i128) -> Option<Self> {
        if denominator == 0 || numerator == i128::MIN || denominator == i128::MIN {
            return None;
        }
        let divisor = gcd(numerator.unsigned_abs(), denominator.unsigned_abs()) as i128;
        let sign = denominator.signum();
        Some(Self {
            numerator: sign * numerator / divisor,
            denominator: denominator.abs() / divisor,
        })
    }

    /// Digits with at most one point among them.
    pub(super) fn decimal(digits: &str) -> Option<Self> {
        let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
        let all = [whole, part].concat();
        if all.is_empty() || all.len() > 36 || !all.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        Self::new(all.parse().ok()?, 10i128.checked_pow(part.len() as u32)?)
    }

    pub(super) fn add(self, other: Self) -> Option<Self> {
        let left = self.numerator.checked_mul(other.denominator)?;
        let right = other.numerator.checked_mul(self.denominator)?;
        Self::new(
            left.checked_add(right)?,
            self.denominator.checked_mul(other.denominator)?,
        )
    }

    pub(super) fn mul(self, other: Self) -> Option<Self> {
        Self::new(
            self.numerator.checked_mul(other.numerator)?,
            self.denominator.checked_mul(other.denominator)?,
        )
    }

    pub(super) fn negated(self) -> Self {
        Self {
            numerator: -self.numerator,
            ..self
        }
    }

    pub(super) fn inverse(self) -> Option<Self> {
        Self::new(self.denominator, self.numerator)
    }

    /// `self` to an integer power of at most 1024.
    pub(super) fn pow(self, exponent: Self) -> Option<Self> {
        if exponent.denominator != 1 || exponent.numerator.unsigned_abs() > 1024 {
            return None;
        }
        let base = if exponent.numerator < 0 { self.inverse()? } else { self };
        let power = exponent.numerator.unsigned_abs() as u32;
        Self::new(base.numerator.checked_pow(power)?, base.denominator.checked_pow(power)?)
    }

    /// The root, where it is a fraction.
    pub(super) fn sqrt(self) -> Option<Self> {
        let root = |value: i128| -> Option<i128> {
            let root = u128::try_from(value).ok()?.isqrt();
            (root * root == value as u128).then_some(root as i128)
        };
        Self::new(root(self.numerator)?, root(self.denominator)?)
    }

    pub(super) fn is_integer(self) -> bool {
        self.denominator == 1
    }

    pub(super) fn to_f64(self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }
}

fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_are_exact_and_reduced() {
        let r = |n, d| Rational::new(n, d).unwrap();
        assert_eq!(r(2, -4), r(-1, 2));
        assert_eq!(Rational::decimal("0.50"), Some(r(1, 2)));
        assert_eq!(Rational::decimal(".25"), Some(r(1, 4)));
        assert_eq!(Rational::decimal("18."), Some(Rational::integer(18)));
        assert_eq!(Rational::decimal("."), None);
        assert_eq!(r(1, 2).add(r(1, 3)), Some(r(5, 6)));
        assert_eq!(r(9, 4).sqrt(), Some(r(3, 2)));
        assert_eq!(r(2, 1).sqrt(), None);
        assert_eq!(r(-4, 1).sqrt(), None);
        assert_eq!(r(2, 3).pow(Rational::integer(-2)), Some(r(9, 4)));
    }

    #[test]
    fn what_does_not_fit_is_no_number() {
        let huge = Rational::integer(i128::MAX);
        assert_eq!(huge.add(Rational::integer(1)), None);
        assert_eq!(huge.mul(huge), None);
        assert_eq!(Rational::integer(10).pow(Rational::integer(100)), None);
        assert_eq!(Rational::integer(0).inverse(), None);
        assert_eq!(Rational::integer(0).pow(Rational::integer(-1)), None);
        assert_eq!(Rational::decimal(&"9".repeat(40)), None);
    }
}
