//! Problems in free text for a model that is loaded: its tokenizer and its folder ([`TextLanguage`]), and the sets that are
//! read from files ([`TextProblems`]).
mod language;
mod problems;

pub use language::TextLanguage;
pub use problems::TextProblems;
