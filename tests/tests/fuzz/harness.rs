//! Runs a target on its corpus and on mutations of it.
use std::{
    any::Any,
    collections::BTreeSet,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::{
    allocations::peak_of,
    mutate::{Form, MAX_BYTES, mutate},
};

/// Mutations of each file of the corpus; `QUADS_FUZZ_RUNS` overrides it.
const RUNS: u64 = 60;
/// Memory that an input may cost: so many times its size (a JSON value is larger than its text), …
const MEMORY_FACTOR: usize = 64;
/// … and so many bytes besides.
const MEMORY: usize = 256 << 10;
/// Inputs that fail, until a target stops.
const MAX_FAILURES: usize = 5;

/// A reader of strangers' bytes.
pub struct Target {
    /// Of the folder of its corpus.
    pub name: &'static str,
    /// How its inputs are built.
    pub form: Form,
    /// What means something in its inputs.
    pub dictionary: &'static [&'static str],
    /// The files of the corpus that are accepted. All others are refused, but for `found_*`, of which nothing is known.
    pub accepted: &'static [&'static str],
    /// Time that an input may take.
    pub time: Duration,
    /// Memory that an input may cost beyond what every target has, in bytes.
    pub memory: usize,
    /// Makes what has to lie beside the input in the folder.
    pub prepare: fn(&Path),
    /// The file that an input goes to.
    pub file: fn(&[u8]) -> &'static str,
    /// Reads the input from the folder. `Err` is the reader's error; whatever must not happen panics.
    pub read: fn(&Path, &[u8]) -> Result<(), String>,
}

impl Target {
    /// A target with the usual bounds.
    pub const fn new(name: &'static str, read: fn(&Path, &[u8]) -> Result<(), String>) -> Self {
        Self {
            name,
            form: Form::Text,
            dictionary: &[],
            accepted: &[],
            time: Duration::from_millis(250),
            memory: 0,
            prepare: |_| {},
            file: |_| "input",
            read,
        }
    }

    /// Runs it on all inputs.
    pub fn run(&self) {
        let start = Instant::now();
        let corpus = self.corpus();
        let folder = self.scratch("input");
        (self.prepare)(&folder);
        let contents: Vec<&[u8]> = corpus.iter().map(|(_, content)| content.as_slice()).collect();
        let (mut inputs, mut accepted, mut failures) = (0, 0, vec![]);
        for (seed, (name, content)) in corpus.iter().enumerate() {
            let mut judge = |label: String, input: &[u8], expected: Option<bool>| {
                inputs += 1;
                match self.judge(&folder, input) {
                    Ok(read) => {
                        accepted += usize::from(read.is_ok());
                        if expected.is_some_and(|expected| expected != read.is_ok()) {
                            failures.push(format!("{label}: the corpus expects otherwise: {read:?}"));
                        }
                    }
                    Err(problem) => failures.push(format!("{label}: {problem}\n  {}", self.keep(input))),
                }
                failures.len() < MAX_FAILURES
            };
            let expected = (!name.starts_with("found_")).then(|| self.accepted.contains(&name.as_str()));
            let mut going = judge(name.clone(), content, expected);
            for run in 0..runs() {
                let mut rng = ChaCha8Rng::seed_from_u64((seed as u64) << 40 | run);
                let input = mutate(&mut rng, self.form, content, &contents, self.dictionary);
                going = going && judge(format!("{name}, mutation {run}"), &input, None);
            }
        }
        println!(
            "{}: {inputs} inputs, {accepted} accepted, {:?}",
            self.name,
            start.elapsed()
        );
        assert!(failures.is_empty(), "{}:\n{}", self.name, failures.join("\n"));
        assert!(0 < accepted && accepted < inputs, "{accepted} of {inputs} are accepted");
    }

    /// Reads an input. The outer error is what must not happen.
    fn judge(&self, folder: &Path, input: &[u8]) -> Result<Result<(), String>, String> {
        let path = folder.join((self.file)(input));
        fs::write(&path, input).unwrap();
        let timed = || {
            let start = Instant::now();
            let (read, peak) = peak_of(|| catch_unwind(AssertUnwindSafe(|| (self.read)(folder, input))));
            (read, peak, start.elapsed())
        };
        let (read, peak, mut least) = timed();
        let read = read.map_err(|panic| format!("panicked: {}", message(&*panic)))?;
        // The least of several: another process may hold the processor.
        for _ in 0..8 {
            if least > self.time {
                least = least.min(timed().2);
            }
        }
        fs::remove_file(&path).unwrap();
        let (bytes, memory) = (input.len(), MEMORY_FACTOR * input.len() + MEMORY + self.memory);
        if least > self.time {
            return Err(format!("{bytes} bytes took {least:?}, at most {:?}", self.time));
        }
        if peak > memory {
            return Err(format!("{bytes} bytes cost {peak} of memory, at most {memory}"));
        }
        Ok(read)
    }

    /// Names and contents, by name.
    fn corpus(&self) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/fuzz_corpus")).join(self.name);
        let mut corpus: Vec<_> = fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.unwrap().path())
            .map(|path| {
                let name = path.file_name().unwrap().to_str().unwrap().to_string();
                (name, fs::read(path).unwrap())
            })
            .collect();
        corpus.sort();
        let names: BTreeSet<&str> = corpus.iter().map(|(name, _)| name.as_str()).collect();
        for name in self.accepted {
            assert!(names.contains(name), "{}: no file {name}", folder.display());
        }
        assert!(corpus.iter().all(|(_, content)| content.len() <= MAX_BYTES));
        corpus
    }

    /// An empty folder of this target.
    fn scratch(&self, name: &str) -> PathBuf {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join("fuzz")
            .join(self.name)
            .join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    /// Writes an input that failed, and says how to keep it.
    fn keep(&self, input: &[u8]) -> String {
        let hash = input.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let failed = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fuzz_failed");
        fs::create_dir_all(&failed).unwrap();
        let path = failed.join(format!("{}-{hash:016x}", self.name));
        fs::write(&path, input).unwrap();
        let corpus = format!("tests/fixtures/fuzz_corpus/{}/found_{hash:016x}", self.name);
        format!("cp {} {corpus}", path.display())
    }
}

/// Asserts that an error is about something in `folder`, and gives its text.
pub fn about(folder: &Path, error: impl ToString) -> String {
    let text = error.to_string();
    assert!(text.contains(folder.to_str().unwrap()), "names no file: {text}");
    text
}

fn runs() -> u64 {
    match std::env::var("QUADS_FUZZ_RUNS") {
        Ok(runs) => runs
            .parse()
            .unwrap_or_else(|_| panic!("QUADS_FUZZ_RUNS = {runs}: expected a number")),
        Err(_) => RUNS,
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("?")
}
