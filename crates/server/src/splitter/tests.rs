use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn tools() -> Vec<Tool> {
    let schema = json!({"type": "object", "properties": {
        "path": {"type": "string"}, "list": {"type": "array", "items": {"type": "object"}}
    }});
    vec![Tool::new("f".to_owned(), None, Some(schema), "tools").unwrap()]
}

/// An answer, put together again: thought, text, calls as JSON.
#[derive(Debug, Default, PartialEq, Clone)]
struct Whole {
    reasoning: String,
    text: String,
    calls: Vec<Value>,
    stopped: bool,
}

fn split(begin: Begin, parts: &[&[u8]], stops: &[&str]) -> Whole {
    let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
    let mut splitter = Splitter::new(begin, tools(), &stops);
    let mut pieces = Vec::new();
    parts.iter().for_each(|part| splitter.push(part, &mut pieces));
    splitter.finish(&mut pieces);
    let mut whole = Whole { stopped: splitter.stopped_by().is_some(), ..Whole::default() };
    for piece in pieces {
        match piece {
            Piece::Reasoning(text) => whole.reasoning.push_str(&text),
            Piece::Text(text) => whole.text.push_str(&text),
            Piece::Call(call) => whole.calls.push(json!([call.name, call.arguments])),
        }
    }
    whole
}

/// The same for every place where the answer can be cut in two, and for bytes one by one.
fn check(begin: Begin, answer: &str, reasoning: &str, text: &str, calls: &[Value]) {
    let expected = Whole {
        reasoning: reasoning.to_owned(),
        text: text.to_owned(),
        calls: calls.to_vec(),
        stopped: false,
    };
    let bytes = answer.as_bytes();
    for at in 0..=bytes.len() {
        assert_eq!(split(begin, &[&bytes[..at], &bytes[at..]], &[]), expected, "cut at {at}");
    }
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(split(begin, &single, &[]), expected, "byte by byte");
}

#[test]
fn thought_is_split_from_text_wherever_the_answer_is_cut() {
    check(Begin::Thinking, "Hm, é.\n</think>\n\nHi é\n", "Hm, é.", "Hi é\n", &[]);
    check(Begin::Either, "<think>\nHm\n\nso\n</think>\n\nHi", "Hm\n\nso", "Hi", &[]);
    check(Begin::Either, "\n<think>\n\n</think>\n\nHi", "", "Hi", &[]);
    check(Begin::Either, "Hi <think>no</think>", "", "Hi <think>no</think>", &[]);
    check(Begin::Either, "<thin", "", "<thin", &[]);
    check(Begin::Thinking, "never ends </thin", "never ends </thin", "", &[]);
    check(Begin::Text, "<think>raw</think>", "", "<think>raw</think>", &[]);
}

#[test]
fn calls_come_out_whole_wherever_the_answer_is_cut() {
    let call = json!(["f", {"path": "a"}]);
    check(
        Begin::Either,
        "<think>\nx\n</think>\n\nLet me.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"path\": \"a\"}}\n</tool_call>\n",
        "x",
        "Let me.",
        std::slice::from_ref(&call),
    );
    check(
        Begin::Either,
        "<tool_call>\n<function=f>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>\n<tool_call>{\"name\":\"f\"}</tool_call>",
        "",
        "",
        &[call.clone(), json!(["f", {}])],
    );
    check(
        Begin::Either,
        "<function=f>\n<parameter=path>\na\n</parameter>\n</function>\n",
        "",
        "",
        &[call],
    );
    check(
        Begin::Either,
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"path\": \"</tool_call>\", \"list\": [{\"a\": {}}]}}</tool_call>",
        "",
        "",
        &[json!(["f", {"path": "</tool_call>", "list": [{"a": {}}]}])],
    );
}

#[test]
fn what_never_becomes_a_call_is_shown_as_it_was_written() {
    for text in [
        "<tool_call>\n{\"name\": \"f\", \"argum",
        "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>{</tool_call>",
        "a <function=f>\n<parameter=path>",
        "a < b, <tool",
    ] {
        check(Begin::Either, text, "", text.trim_end(), &[]);
    }
}

#[test]
fn without_tools_everything_is_text() {
    let text = "<tool_call>{\"name\": \"f\"}</tool_call>\n";
    let mut splitter = Splitter::new(Begin::Either, Vec::new(), &[]);
    let mut pieces = Vec::new();
    splitter.push(text.as_bytes(), &mut pieces);
    splitter.finish(&mut pieces);
    assert_eq!(pieces, [Piece::Text(text.to_owned())]);
}

#[test]
fn a_stop_text_ends_the_text_and_not_the_thought() {
    let answer = b"<think>END</think>one END two";
    let whole = split(Begin::Either, &[answer], &["END"]);
    assert_eq!((whole.reasoning.as_str(), whole.text.as_str()), ("END", "one "));
    assert!(whole.stopped);
    assert_eq!(split(Begin::Text, &[b"one EN", b"D two"], &["END"]).text, "one ");
    assert_eq!(split(Begin::Text, &[b"one EN", b"T"], &["END"]).text, "one ENT");
    assert_eq!(split(Begin::Text, &[b"xabcd"], &["abcd", "bc"]).text, "xa");
}

#[test]
fn every_token_of_text_is_shown_at_once() {
    let mut splitter = Splitter::new(Begin::Either, tools(), &["\n\n".to_owned()]);
    let mut counts = Vec::new();
    for token in ["Hel", "lo", " wor", "ld", " <", "b>"] {
        let mut pieces = Vec::new();
        splitter.push(token.as_bytes(), &mut pieces);
        counts.push(pieces.len());
    }
    assert_eq!(counts, [1, 1, 1, 1, 0, 1]);
}

/// Tags and what comes near to them.
fn fragments() -> impl Strategy<Value = String> {
    let parts = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"f\", \"arguments\": {\"path\": \"é\"}}",
        "<function=f>",
        "</function>",
        "<parameter=path>",
        "</parameter>",
        "\n",
        " ",
        "é",
        "END",
        "<",
        "{",
    ];
    prop::collection::vec(prop::sample::select(parts.to_vec()), 0..14)
        .prop_map(|list| list.concat())
}

proptest! {
    #[test]
    fn where_tokens_are_cut_never_changes_the_answer(
        answer in fragments(),
        cuts in prop::collection::vec(any::<usize>(), 0..20),
        begin in prop::sample::select(vec![Begin::Thinking, Begin::Either, Begin::Text]),
    ) {
        let bytes = answer.as_bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let parts: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        let stops = ["END", "é\n"];
        prop_assert_eq!(split(begin, &parts, &stops), split(begin, &[bytes], &stops));
    }

    #[test]
    fn any_bytes_are_split_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let whole = split(Begin::Text, &[&bytes], &[]);
        prop_assert!(whole.reasoning.is_empty());
    }
}
