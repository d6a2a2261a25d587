//! The final answer in a completion.

/// The text that `completion` gives as its final answer, or `None` when it gives none. The rules are those of the
/// [module](super).
pub fn final_answer(completion: &str) -> Option<String> {
    let text = match completion.rfind("</think>") {
        Some(end) => &completion[end + "</think>".len()..],
        None if completion.contains("<think>") => return None,
        None => completion,
    };
    match boxed(text) {
        Boxed::Answer(answer) => return Some(answer),
        Boxed::Unclosed => return None,
        Boxed::Absent => {}
    }
    let answer = tagged(text)
        .or_else(|| marked(text))
        .or_else(|| after_answer(text))
        .or_else(|| bold(text))
        .or_else(|| only_line(text))?;
    let answer = answer.trim();
    (!answer.is_empty()).then(|| answer.to_string())
}

enum Boxed {
    /// The content of the last box, or of the boxes that the last statement lists.
    Answer(String),
    Unclosed,
    Absent,
}

const BOXES: [&str; 2] = ["\\boxed", "\\fbox"];

/// Content and extent of a box.
struct Span {
    start: usize,
    end: usize,
    content: (usize, usize),
}

fn boxed(text: &str) -> Boxed {
    let closing = closing_braces(text);
    let mut boxes: Vec<Span> = vec![];
    let mut unclosed = false;
    let named = |name: &'static str| text.match_indices(name);
    let mut starts: Vec<(usize, &str)> = BOXES.into_iter().flat_map(named).collect();
    starts.sort_unstable();
    for (start, name) in starts {
        // A box within a box is part of its content.
        if boxes.last().is_some_and(|last| start < last.end) {
            continue;
        }
        let rest = &text[start + name.len()..];
        let open = text.len() - rest.trim_start().len();
        unclosed = false;
        if text[open..].starts_with('{') {
            match closing.binary_search_by_key(&open, |(open, _)| *open) {
                Ok(at) => boxes.push(Span {
                    start,
                    end: closing[at].1 + 1,
                    content: (open + 1, closing[at].1),
                }),
                Err(_) => unclosed = true,
            }
        } else {
            // `\boxed 4`: up to the end of the word or formula.
            let length = text[open..].find([' ', '\n', '$']).unwrap_or(text.len() - open);
            match length {
                0 => unclosed = true,
                _ => boxes.push(Span {
                    start,
                    end: open + length,
                    content: (open, open + length),
                }),
            }
        }
    }
    if unclosed {
        return Boxed::Unclosed;
    }
    let Some(last) = boxes.len().checked_sub(1) else {
        return Boxed::Absent;
    };
    let mut first = last;
    while first > 0 && joins(&text[boxes[first - 1].end..boxes[first].start]) {
        first -= 1;
    }
    let content = |span: &Span| text[span.content.0..span.content.1].trim().to_string();
    let mut listed: Vec<String> = boxes[first..].iter().map(content).collect();
    listed.dedup();
    Boxed::Answer(listed.join(", "))
}

/// Byte positions of the `{` that are closed and of their `}`, in order of the former; `\{` and `\}` are no braces.
fn closing_braces(text: &str) -> Vec<(usize, usize)> {
    let (mut open, mut pairs, mut escaped) = (vec![], vec![], false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'\\' => {
                escaped = !escaped;
                continue;
            }
            b'{' if !escaped => open.push(at),
            b'}' if !escaped => pairs.extend(open.pop().map(|open| (open, at))),
            _ => {}
        }
        escaped = false;
    }
    pairs.sort_unstable();
    pairs
}

/// Whether text between two boxes makes them one list.
fn joins(between: &str) -> bool {
    if between.len() > 40 {
        return false;
    }
    let mut rest = between.replace("\\text", " ").replace("\\quad", " ");
    for word in ["or", "and"] {
        rest = rest.replacen(word, " , ", 1);
    }
    rest.contains([',', ';']) && rest.chars().all(|c| c.is_whitespace() || ",;$&{}\\".contains(c))
}

fn tagged(text: &str) -> Option<&str> {
    let end = text.rfind("</answer>")?;
    let start = text[..end].rfind("<answer>")? + "<answer>".len();
    Some(&text[start..end])
}

/// Behind the last `####`, unless that is a heading: an answer is one word, or starts as a number does.
fn marked(text: &str) -> Option<&str> {
    let at = text.rfind("####")?;
    let line = line(&text[at + "####".len()..]).unwrap_or_default();
    let number = line.starts_with(|c: char| c.is_ascii_digit() || "-+.$\\(€£".contains(c));
    (number || line.split_whitespace().count() < 2).then_some(line)
}

/// Behind the last `answer:` or `answer is`.
fn after_answer(text: &str) -> Option<&str> {
    let lower = text.to_ascii_lowercase();
    lower.rmatch_indices("answer").find_map(|(at, word)| {
        let rest = text[at + word.len()..].trim_start_matches(['*', '_', ' ']);
        let rest = match rest.strip_prefix(':') {
            Some(rest) => rest,
            None => {
                let rest = rest.strip_prefix("is")?;
                let rest = rest.strip_prefix(':').unwrap_or(rest);
                rest.starts_with([' ', '$', '*', '\n']).then_some(rest)?
            }
        };
        line(rest.trim_start_matches(['*', '_', ' ', '\n']))
    })
}

/// The first line without the marks of emphasis at its end.
fn line(text: &str) -> Option<&str> {
    let line = text.lines().next()?.trim();
    let line = line.trim_end_matches(['*', '_']);
    (!line.is_empty()).then_some(line)
}

fn bold(text: &str) -> Option<&str> {
    let end = text.rfind("**")?;
    let start = text[..end].rfind("**")? + 2;
    let inside = text[start..end].trim();
    (!inside.is_empty() && !inside.contains('\n')).then_some(inside)
}

fn only_line(text: &str) -> Option<&str> {
    let text = text.trim();
    (!text.contains('\n')).then_some(text)
}
