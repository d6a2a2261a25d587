//! `chat_template.jinja` and `tokenizer_config.json`.
use std::{collections::BTreeMap, path::Path, time::Duration};

use burn_quads::text::{ChatMessage, ChatTemplate};

use crate::{
    allocations::uncounted,
    harness::{Target, about},
    mutate::Form,
};

const TARGET: Target = Target {
    form: Form::Text,
    dictionary: &[
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "{%- for m in messages %}",
        "{% endfor %}",
        "{% if ",
        "{% endif %}",
        "{% set x = ",
        "{% macro f() %}",
        "{% endmacro %}",
        "{% raw %}",
        "{% block a %}",
        "messages",
        "loop.index0",
        "namespace(",
        " | tojson",
        " | indent(",
        " | length",
        " | sort",
        " | reverse",
        ".split(",
        "[::-1]",
        "range(",
        "raise_exception(",
        "(",
        ")",
        " ~ ",
        " ** ",
        "'",
    ],
    accepted: &[
        "config",
        "config_of_several",
        "empty",
        "macro",
        "methods",
        "namespace",
        "slices",
        "turns",
    ],
    // A million steps of a template that has no end.
    time: Duration::from_secs(2),
    file: |input| match input.starts_with(b"{\"") {
        true => "tokenizer_config.json",
        false => "chat_template.jinja",
    },
    ..Target::new("chat_template", read)
};

#[test]
fn no_template_breaks_a_chat() {
    TARGET.run();
}

fn read(folder: &Path, _: &[u8]) -> Result<(), String> {
    let template = ChatTemplate::open(folder).map_err(|error| about(folder, error))?;
    let messages = [
        ChatMessage::new("system", "a \"b\""),
        ChatMessage::new("user", "c\nd </think> é"),
    ];
    let variables = BTreeMap::from([("enable_thinking".to_string(), false.into())]);
    // A template may say the same thing as often as it likes. (It is compiled in a thread of its own, uncounted too.)
    let rendered = uncounted(|| template.render(&messages, true, &variables));
    rendered.map(drop).map_err(|error| about(folder, error))
}
