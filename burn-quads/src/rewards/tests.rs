use super::*;
use crate::dataset::{FieldNames, load_problems};

const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/math_reward/cases.json");

#[test]
fn every_known_case_is_judged_as_expected() {
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(CASES).unwrap()).unwrap();
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 33);
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            let field = |name: &str| case[name].as_str().unwrap();
            let reward = math_reward(field("text"), field("gold"));
            (f64::from(reward) != case["expected"].as_f64().unwrap()).then(|| format!("{}: {reward}", field("id")))
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn the_answer_is_where_completions_put_it() {
    for (completion, answer) in [
        ("<think>maybe \\boxed{7}</think>It is \\boxed{8}.", Some("8")),
        ("<think>it must be \\boxed{8}", None),
        ("\\boxed{\\{1, 2\\}}", Some("\\{1, 2\\}")),
        ("\\boxed{1} or \\boxed{2}", Some("1, 2")),
        ("\\boxed{1}, \\boxed{1}", Some("1")),
        ("\\boxed{7}, hence the total is \\boxed{8}", Some("8")),
        ("\\boxed 5$", Some("5")),
        ("\\boxed{\\boxed{4}}", Some("\\boxed{4}")),
        ("<answer> 12 </answer>", Some("12")),
        ("a\n#### 1,000\nb", Some("1,000")),
        ("####", None),
        ("#### Step by step\nThe answer is 42", Some("42")),
        ("#### Final Answer\n**42**", Some("42")),
        ("It is \\fbox{7}", Some("7")),
        ("**Answer:** 42", Some("42")),
        ("The final answer is: $42$", Some("$42$")),
        ("The answer is 42", Some("42")),
        ("answering this is hard\nI give up", None),
        ("So **7**, no, **73**.", Some("73")),
        (" 1125 \n", Some("1125")),
        ("25 * 45 =\nsomething", None),
        ("", None),
        ("\\boxed{}", Some("")),
    ] {
        assert_eq!(final_answer(completion).as_deref(), answer, "{completion}");
    }
}

#[test]
fn the_same_answers() {
    for (answer, reference) in [
        ("x = 5", "5"),
        ("5", "x=5"),
        ("y = 2x+1", "y=1+2x"),
        ("12 cm", "12"),
        ("12cm^2", "12"),
        ("12", "12 \\text{ cm}"),
        ("42 apples", "42"),
        ("5 m", "5"),
        ("1 1/2", "\\frac{3}{2}"),
        ("-1 1/2", "-1.5"),
        (
            "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
            "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
        ),
        ("1011_2", "1011_{2}"),
        ("\\binom52", "\\binom{5}{2}"),
        ("11,\\! 111,\\! 111", "11111111"),
        ("x \\in [1,2]", "[1,2]"),
        ("[1,2]\\cup[3,4]", "x\\in[1,2]\\cup[3,4]"),
        ("\\boxed{42}", "42"),
        ("\\text{42 apples}", "42"),
        ("f(x) = 2x", "2x"),
        ("x \\leqslant 3", "x \\le 3"),
        ("60 miles per hour", "60"),
        ("\\text{Monday}", "monday"),
        ("(C)", "C"),
        ("\\text{(C)}", "C"),
        ("1 000 000", "1000000"),
        ("1,234.50", "1234.5"),
        ("-1,000", "-1000"),
        ("2, -1", "-1, 2"),
        ("1 or 2", "2, 1"),
        ("[0, 1) \\cup (2, \\infty)", "(2,\\infty)\\cup[0,1)"),
        ("(\\frac{1}{2}, 0.25)", "(0.5, \\frac14)"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\pi/2)"),
        ("\\frac{2}{4}", "\\frac{1}{2}"),
        ("18.00", "18"),
        ("\\$18", "18"),
        ("0", "-0"),
        ("\\alpha + 1", "1 + \\alpha"),
        ("p^2 - pq", "p(p-q)"),
        ("7 million", "7000000"),
        ("7000000", "7 million"),
        ("$7.5$ million dollars", "7,500,000"),
        ("7\\text{ million}", "7{,}000{,}000"),
        ("12 (twelve)", "12"),
        ("60 kWh", "60"),
        ("x*y*z", "xyz"),
        ("21", "21 (twenty one)"),
        ("40 (Forty)", "40"),
        ("{5}", "5"),
    ] {
        assert!(same_answer(answer, reference), "{answer} and {reference}");
    }
}

#[test]
fn other_answers() {
    for (answer, reference) in [
        ("", ""),
        ("5x", "5"),
        ("1 1/2", "11/2"),
        ("11/2", "1 1/2"),
        ("3 4", "34"),
        ("1\n2", "12"),
        ("2x=7", "7"),
        ("x^2=7", "7"),
        ("xy=7", "7"),
        ("\\sqrt{x}=7", "7"),
        ("|x|=7", "7"),
        ("7 million", "7"),
        ("7 millions", "7"),
        ("7 million", "7 billion"),
        ("7 million", "7000"),
        ("7 millionths", "7000000"),
        ("7 millionths", "7"),
        ("2 thirds", "2"),
        ("2*3 million", "6000000"),
        ("12 (thirteen)", "12"),
        ("12 (twelve)", "13"),
        ("12 (x)", "12"),
        ("12 (3)", "12"),
        ("cat", "act"),
        ("part", "trap"),
        ("\\alpha", "\\beta"),
        ("7 dozen", "7"),
        ("7 pi", "7"),
        ("7 i", "7"),
        ("7 times x", "7"),
        ("7 but maybe eight", "7"),
        ("7 is wrong", "7"),
        ("5 x", "5"),
        ("5m", "5"),
        ("12 cm", "12 m"),
        ("42 or 43", "42"),
        ("1,2,3", "3"),
        ("(1,2)", "(2,1)"),
        ("[1,2]", "(1,2)"),
        ("\\{1,1\\}", "\\{1,2\\}"),
        ("1,00", "100"),
        ("1,0000", "10000"),
        ("10,00,000", "1000000"),
        ("25 + 45 + 71 + 66", "207"),
        ("2 × 2 × 3", "12"),
        ("3", "-3"),
        ("cat", "dog"),
        ("42 because 6*7 = 42", "42"),
        ("0.33", "1/3"),
        ("100000000000000000000000000000000000000000000", "1"),
    ] {
        assert!(!same_answer(answer, reference), "{answer} and {reference}");
    }
}

#[test]
fn sampled_tasks_are_judged_by_their_answers() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/reasoning_gym");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jsonl") {
            continue;
        }
        let problems = load_problems(&path, &FieldNames::default()).unwrap();
        assert_eq!(problems.len(), 200, "{}", path.display());
        for (problem, next) in problems.iter().zip(problems.iter().cycle().skip(1)) {
            let answer = &problem.answer;
            for completion in [
                answer.to_string(),
                format!("{answer}.\n"),
                format!("Let me see.\nThe answer is {answer}"),
                format!("<think>…</think>\n<answer>{answer}</answer>"),
                format!("So it is $\\boxed{{{answer}}}$."),
            ] {
                assert_eq!(exact_reward(&completion, answer), 1.0, "{completion}");
                assert_eq!(math_reward(&completion, answer), 1.0, "{completion}");
            }
            let other = format!("\\boxed{{{}}}", next.answer);
            assert_eq!(
                exact_reward(&other, answer),
                f32::from(u8::from(next.answer == *answer))
            );
            for echo in [&problem.prompt, &format!("\\boxed{{{}}}", problem.prompt)] {
                assert_eq!(exact_reward(echo, answer), 0.0, "{echo}");
                assert_eq!(math_reward(echo, answer), 0.0, "{echo}");
            }
        }
        files += 1;
    }
    assert_eq!(files, 16);
}

#[test]
fn exact_means_one_spelling() {
    assert_eq!(exact_reward("\\boxed{2 × 2 × 3}", "2 × 2 × 3"), 1.0);
    assert_eq!(exact_reward("\\boxed{12}", "2 × 2 × 3"), 0.0);
    assert_eq!(exact_reward("47/90.\n", "47/90"), 1.0);
    assert_eq!(exact_reward("94/180", "47/90"), 0.0);
}

mod any_text {
    use super::*;
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    /// Pieces that mean something to the rules, in any order.
    fn pieces() -> impl Strategy<Value = String> {
        let piece = prop::sample::select(vec![
            "\\boxed{",
            "\\boxed",
            "}",
            "{",
            "\\{",
            "\\}",
            "####",
            "answer",
            "Answer:",
            " is ",
            "**",
            "<think>",
            "</think>",
            "<answer>",
            "</answer>",
            "\\frac",
            "\\sqrt",
            "^",
            "_",
            "(",
            ")",
            "[",
            "]",
            ",",
            " ",
            "\n",
            "$",
            "\\",
            "\\text{",
            "1",
            "0",
            "9",
            ".",
            "-",
            "+",
            "*",
            "/",
            "x",
            "=",
            "é",
            "½",
            "∞",
            "\\cup",
            " or ",
            "\\pi",
            "e5",
            "\u{a0}",
        ]);
        prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn is_judged_without_a_panic(completion in pieces(), reference in pieces()) {
            math_reward(&completion, &reference);
            same_answer(&completion, &reference);
            same_answer(&reference, &completion);
        }

        #[test]
        fn equals_itself(answer in pieces()) {
            let something = !super::latex::plain(&answer).is_empty();
            prop_assert_eq!(same_answer(&answer, &answer), something);
        }

        #[test]
        fn any_string_is_judged(completion in any::<String>(), reference in any::<String>()) {
            math_reward(&completion, &reference);
        }
    }

    #[test]
    fn of_64_kib_is_judged_within_ten_milliseconds() {
        let pieces = [
            "\\boxed{",
            "\\boxed{1}",
            "\\boxed{1},",
            "\\boxed ",
            "{",
            "}",
            "\\",
            "####",
            "#### 1\n",
            "answer",
            "answer is ",
            "answer: \n",
            "**",
            "<answer>",
            "<think>",
            "</think>",
            "\\text{",
            "\\text{a}",
            "(",
            "1,",
            "1,000",
            "-",
            "^",
            "9^{",
            "\\frac",
            "\\cup",
            " or ",
            "x",
            "½",
            "∞ ",
            "=",
            "\"",
            "1 ",
            ".",
        ];
        for piece in pieces {
            for (head, tail) in [
                ("", ""),
                ("\\boxed{", "}"),
                ("#### ", ""),
                ("answer: ", ""),
                ("**", "**"),
            ] {
                let text = format!("{head}{}{tail}", piece.repeat((64 << 10) / piece.len()));
                let once = || {
                    let start = Instant::now();
                    math_reward(&text, "1");
                    start.elapsed()
                };
                // Once is enough: other processes may hold the processor.
                let took: Vec<_> = (0..50)
                    .map(|_| once())
                    .take_while(|took| *took >= Duration::from_millis(10))
                    .collect();
                assert!(took.len() < 50, "{piece:?} after {head:?}: {:?}", took.iter().min());
            }
        }
    }
}
