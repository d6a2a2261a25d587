//! Rule-based rewards for answers in free text: what the completion gives as its final answer ([`final_answer`]), and
//! whether that is the reference's ([`same_answer`]).
//!
//! Only the completion is judged, never the prompt. The rules, in the order in which they are tried:
//!
//! | the completion has | its answer is |
//! |---|---|
//! | `</think>` | looked for behind the last one only; a `<think>` that is never closed has no answer |
//! | `\boxed{…}`, `\fbox{…}` | the last box; boxes joined by commas or "or" are one list; an unclosed last box is no answer |
//! | `<answer>…</answer>` | between the last tags |
//! | `#### …` | the rest of the line behind the last mark (GSM8K), if it is one word or starts as a number does |
//! | `Answer: …`, `the answer is …` | the rest of the line behind the last one |
//! | `**…**` | the last bold text |
//! | one line and nothing else | that line |
//!
//! Answers are equal when they are the same number (thousands separators, decimals, fractions, mixed numbers, powers,
//! scientific notation, `7 million`, `12 (twelve)`, exactly, with units, currency and percent signs left out), interval,
//! tuple, set or list of such, the same expression up to algebra (checked at sample points), or the same text. An
//! unevaluated sum or product of numbers is not the number: what the question asks for has to be worked out.
//!
//! Every function takes time linear in the completion, never panics and never evaluates more than a short text: longer
//! answers are compared as text.
mod answer;
mod expression;
mod extract;
mod latex;
mod pass_at_k;
mod rational;

pub use answer::same_answer;
pub use extract::final_answer;
pub use pass_at_k::pass_at_k;

/// 1 when the final answer of `completion` equals `reference`, else 0.
pub fn math_reward(completion: &str, reference: &str) -> f32 {
    let right = final_answer(completion).is_some_and(|answer| same_answer(&answer, reference));
    f32::from(u8::from(right))
}

/// 1 when the final answer of `completion` is the text of `reference`, but for white space at both ends and a final full
/// stop, else 0. For tasks with one right spelling, such as a prime factorization.
pub fn exact_reward(completion: &str, reference: &str) -> f32 {
    fn plain(text: &str) -> &str {
        let text = text.trim();
        text.strip_suffix('.').unwrap_or(text).trim_end()
    }
    let right = final_answer(completion).is_some_and(|answer| plain(&answer) == plain(reference));
    f32::from(u8::from(right))
}

#[cfg(test)]
mod tests;
