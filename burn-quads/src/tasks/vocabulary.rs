//! Text to token ids, one token a character.
use std::collections::BTreeMap;

/// A character-level vocabulary: padding, beginning and end of sequence, then characters in the order of their code
/// points, so that the ids depend on the set of characters alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    characters: Vec<char>,
    ids: BTreeMap<char, u32>,
}

/// A text that the vocabulary cannot write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} has the character {character:?} at position {position}, which is not in the vocabulary {known:?}")]
pub struct VocabularyError {
    /// The whole text.
    pub text: String,
    /// The first character without a token.
    pub character: char,
    /// Its position, in characters.
    pub position: usize,
    /// The characters that have one.
    pub known: String,
}

impl Vocabulary {
    /// Padding; never sampled on purpose, never part of an answer.
    pub const PAD: u32 = 0;
    /// Beginning of sequence: the first token of every prompt.
    pub const BOS: u32 = 1;
    /// End of sequence: the last token of every answer.
    pub const EOS: u32 = 2;
    const SPECIAL: [&'static str; 3] = ["<pad>", "<bos>", "<eos>"];

    /// The vocabulary of a set of characters; repeated ones count once.
    pub fn new(characters: impl IntoIterator<Item = char>) -> Self {
        let mut characters: Vec<char> = characters.into_iter().collect();
        characters.sort_unstable();
        characters.dedup();
        let ids = characters.iter().copied().zip(Self::SPECIAL.len() as u32..).collect();
        Self { characters, ids }
    }

    /// Number of tokens, the special ones included. Never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        Self::SPECIAL.len() + self.characters.len()
    }

    /// The token ids of a text, without special tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, VocabularyError> {
        text.chars()
            .enumerate()
            .map(|(position, character)| {
                self.ids.get(&character).copied().ok_or_else(|| VocabularyError {
                    text: text.to_string(),
                    character,
                    position,
                    known: self.characters.iter().collect(),
                })
            })
            .collect()
    }

    /// What the policy is given: beginning of sequence, then the prompt.
    pub fn encode_prompt(&self, prompt: &str) -> Result<Vec<u32>, VocabularyError> {
        let mut ids = vec![Self::BOS];
        ids.extend(self.encode(prompt)?);
        Ok(ids)
    }

    /// What the policy has to write: the answer, then end of sequence.
    pub fn encode_answer(&self, answer: &str) -> Result<Vec<u32>, VocabularyError> {
        let mut ids = self.encode(answer)?;
        ids.push(Self::EOS);
        Ok(ids)
    }

    /// The text of any token ids, for people to read: special tokens by name, ids out of range as `U+FFFD`.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut text = String::with_capacity(ids.len());
        for &id in ids {
            let id = id as usize;
            match Self::SPECIAL.get(id) {
                Some(name) => text.push_str(name),
                None => text.push(*self.characters.get(id - Self::SPECIAL.len()).unwrap_or(&'\u{fffd}')),
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_the_set_of_characters_not_their_order() {
        let vocabulary = Vocabulary::new("=10+1".chars());
        assert_eq!(vocabulary, Vocabulary::new("+01=".chars()));
        assert_eq!(vocabulary.len(), 7);
        assert_eq!(vocabulary.encode("1+0=").unwrap(), [5, 3, 4, 6]);
    }

    #[test]
    fn a_prompt_begins_and_an_answer_ends() {
        let vocabulary = Vocabulary::new("01+=".chars());
        assert_eq!(vocabulary.encode_prompt("1=").unwrap(), [Vocabulary::BOS, 5, 6]);
        assert_eq!(vocabulary.encode_answer("10").unwrap(), [5, 4, Vocabulary::EOS]);
    }

    #[test]
    fn decode_writes_every_id() {
        let vocabulary = Vocabulary::new("01".chars());
        assert_eq!(
            vocabulary.decode(&[1, 3, 4, 2, 0, 5, u32::MAX]),
            "<bos>01<eos><pad>\u{fffd}\u{fffd}"
        );
    }

    #[test]
    fn an_unknown_character_is_named() {
        let error = Vocabulary::new("01".chars()).encode("10x1").unwrap_err();
        assert_eq!((error.character, error.position), ('x', 2));
        assert!(error.to_string().contains("'x' at position 2"), "{error}");
    }
}
