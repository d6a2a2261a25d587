//! Every method of Burn's backend traits is implemented for `Nvfp4<B>`, those with a default too: a default would
//! compile, and quietly replace B's own implementation.
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The sources of burn-backend that this workspace builds.
fn burn_backend() -> PathBuf {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--offline",
            "--filter-platform",
        ])
        .arg(host())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "cargo metadata failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata = String::from_utf8(output.stdout).expect("cargo metadata writes UTF-8");
    let manifests: Vec<PathBuf> = metadata
        .split("\"manifest_path\":\"")
        .skip(1)
        .map(|rest| PathBuf::from(rest[..rest.find('"').expect("a closing quote")].replace("\\\\", "\\")))
        .filter(|path| {
            path.parent().is_some_and(|folder| {
                folder
                    .file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("burn-backend-0.21."))
            })
        })
        .collect();
    assert_eq!(
        manifests.len(),
        1,
        "expected one burn-backend 0.21 in the build, found {manifests:?}"
    );
    manifests[0].parent().expect("a manifest lies in a folder").join("src")
}

/// Host triple, as rustc says it.
fn host() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("-vV").output().expect("rustc runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.strip_prefix("host: "));
    line.expect("rustc names its host").to_string()
}

fn sources(folder: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for path in entries.map(|entry| entry.expect("a readable folder").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                texts.push(without_comments(&text));
            }
        }
    }
    texts
}

/// Drops `//` and `/* */` comments. Burn's traits hold no string with either in it.
fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = [rest.find("//"), rest.find("/*")].into_iter().flatten().min() {
        out.push_str(&rest[..at]);
        let end = match rest[at..].starts_with("//") {
            true => rest[at..].find('\n').map(|end| at + end),
            false => rest[at..].find("*/").map(|end| at + end + 2),
        };
        rest = end.map_or("", |end| &rest[end..]);
    }
    out + rest
}

/// What stands between the braces after `from`.
fn braces(text: &str, from: usize) -> &str {
    let open = from + text[from..].find('{').expect("an opening brace");
    let mut depth = 0;
    for (at, c) in text[open..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[open + 1..open + at];
        }
    }
    panic!("unbalanced braces");
}

/// Names of the functions declared in `body`; with `top`, only those outside of inner braces.
fn functions(body: &str, top: bool) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut depth = 0;
    for (at, c) in body.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        let starts_word = at == 0 || !body[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        if (depth == 0 || !top) && starts_word && body[at..].starts_with("fn ") {
            let name = body[at + 3..].trim_start();
            let end = name
                .find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(name.len());
            if end > 0 {
                names.insert(name[..end].to_string());
            }
        }
    }
    names
}

/// The methods of `pub trait name` in one of the texts.
fn trait_methods(texts: &[String], name: &str) -> BTreeSet<String> {
    let mut found = texts.iter().filter_map(|text| {
        let at = declaration(text, name)?;
        Some(functions(braces(text, at), true))
    });
    let methods = found
        .next()
        .unwrap_or_else(|| panic!("burn-backend has no `pub trait {name}`"));
    assert!(
        found.next().is_none(),
        "burn-backend has more than one `pub trait {name}`"
    );
    assert!(
        !methods.is_empty(),
        "no method found in {name}: the parser has to follow a change of form"
    );
    methods
}

/// Where `pub trait name` is declared.
fn declaration(text: &str, name: &str) -> Option<usize> {
    let head = format!("pub trait {name}");
    let is_whole = |at: &usize| !text[at + head.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_');
    text.match_indices(&head).map(|(at, _)| at).find(is_whole)
}

/// `Backend` and every trait that it asks for and that declares operations.
fn backend_traits(texts: &[String]) -> Vec<String> {
    let text = texts
        .iter()
        .find(|text| declaration(text, "Backend").is_some())
        .expect("`pub trait Backend`");
    let at = declaration(text, "Backend").expect("found above");
    let bounds = &text[at..at + text[at..].find('{').expect("a trait body")];
    let operations = bounds
        .split(['+', ':', ','])
        .map(str::trim)
        .filter_map(|bound| bound.strip_suffix("<Self>"));
    operations.map(String::from).chain(["Backend".to_string()]).collect()
}

/// The methods that `Nvfp4<B>` implements of a trait.
fn implemented(texts: &[String], name: &str) -> BTreeSet<String> {
    let mut methods = BTreeSet::new();
    for text in texts {
        // The form of the macro, whose list follows the items written out.
        for (at, _) in text.match_indices("delegate! {") {
            let body = braces(text, at);
            if body.trim_start().starts_with(&format!("impl {name} ")) {
                methods.extend(functions(body, false));
            }
        }
        for head in [
            format!("impl<B: Nvfp4Backend> {name}<Self> for Nvfp4<B>"),
            format!("impl<B: Nvfp4Backend> {name} for Nvfp4<B>"),
        ] {
            if let Some(at) = text.find(&head) {
                methods.extend(functions(braces(text, at), false));
            }
        }
    }
    methods
}

/// Methods of Burn that `Nvfp4<B>` leaves on their default, by trait.
fn left_on_default(burn: &[String], ours: &[String]) -> BTreeMap<String, Vec<String>> {
    let mut left = BTreeMap::new();
    for name in backend_traits(burn) {
        let missing: Vec<String> = trait_methods(burn, &name)
            .difference(&implemented(ours, &name))
            .cloned()
            .collect();
        if !missing.is_empty() {
            left.insert(name, missing);
        }
    }
    left
}

fn ours() -> Vec<String> {
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/decorator"))
}

#[test]
fn every_backend_method_is_delegated() {
    let burn = sources(&burn_backend());
    let traits = backend_traits(&burn);
    let expected = [
        "FloatTensorOps",
        "BoolTensorOps",
        "IntTensorOps",
        "ModuleOps",
        "ActivationOps",
        "QTensorOps",
    ];
    assert!(
        expected.iter().all(|name| traits.iter().any(|found| found == name)),
        "{traits:?}"
    );
    let methods: usize = traits.iter().map(|name| trait_methods(&burn, name).len()).sum();
    assert!(
        methods >= 428,
        "Burn 0.21.0 has 428 methods, the parser found {methods}"
    );
    let left = left_on_default(&burn, &ours());
    assert!(
        left.is_empty(),
        "not delegated to B, add them to src/decorator: {left:#?}"
    );
}

#[test]
fn a_method_that_burn_adds_is_noticed() {
    let mut burn = sources(&burn_backend());
    let with_default = "    fn float_frobnicate(tensor: FloatTensor<B>) -> FloatTensor<B> { B::float_neg(tensor) }\n";
    for text in &mut burn {
        if let Some(at) = declaration(text, "FloatTensorOps") {
            let brace = at + text[at..].find('{').expect("a trait body");
            text.insert_str(brace + 1, with_default);
        }
    }
    let left = left_on_default(&burn, &ours());
    assert_eq!(
        left,
        BTreeMap::from([("FloatTensorOps".to_string(), vec!["float_frobnicate".to_string()])])
    );
}

#[test]
fn a_trait_that_burn_adds_is_noticed() {
    let burn = vec![
        "pub trait Backend: BackendTypes + WaveOps<Self> + Clone + 'static { fn name() -> String; }".to_string(),
        "pub trait WaveOps<B: Backend> { fn wave(a: [f32; 2]) -> B { other(|| { fn inner() {} }) }\n fn ripple(); }"
            .to_string(),
    ];
    let ours = vec!["impl<B: Nvfp4Backend> Backend for Nvfp4<B> { fn name() -> String { B::name() } }".to_string()];
    let left = left_on_default(&burn, &ours);
    assert_eq!(
        left,
        BTreeMap::from([("WaveOps".to_string(), vec!["ripple".to_string(), "wave".to_string()])])
    );
}

#[test]
fn a_method_that_we_lose_is_noticed() {
    let mut ours = ours();
    let line = "    fn float_erf(tensor: Float) -> Float;\n";
    assert!(ours.iter().any(|text| text.contains(line)));
    for text in &mut ours {
        *text = text.replace(line, "");
    }
    let left = left_on_default(&sources(&burn_backend()), &ours);
    assert_eq!(
        left,
        BTreeMap::from([("FloatTensorOps".to_string(), vec!["float_erf".to_string()])])
    );
}
