//! Rules for one file's text.

use std::path::Path;

use super::lexer::code_only;

/// Most lines of a file, tests not counted. Aim for 300.
const FILE_LINES: usize = 800;

/// Macros that mark something unfinished, looked for in code.
const UNFINISHED: [&str; 3] = ["todo!", "unimplemented!", "dbg!"];

/// Marks of something unfinished, looked for everywhere. In two parts, so that this line is none.
const MARKS: [&str; 2] = [concat!("FIX", "ME"), concat!("XX", "X")];

/// Folders that exist on one machine only.
const MACHINE_FOLDERS: [&str; 4] = ["home", "root", "Users", "work"];

/// Rules for any text. A problem starts with `:line: `.
pub(super) fn text(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let mut report = |problem: &str| problems.push(format!(":{}: {problem}", index + 1));
        if line.contains('\t') {
            report("a tab");
        }
        if line.ends_with(' ') {
            report("space at the end of the line");
        }
        for mark in MARKS.iter().filter(|mark| has_word(line, mark)) {
            report(&format!("`{mark}`: finish it or write an issue"));
        }
        for folder in MACHINE_FOLDERS.iter().filter(|folder| has_machine_path(line, folder)) {
            report(&format!("a path under /{folder} exists on one machine only"));
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        problems.push(": no newline at the end".to_owned());
    }
    problems
}

/// Rules for Rust. `file` is relative to the root.
pub(super) fn rust(file: &Path, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let code = code_only(text);
    let is_test = is_test_file(file);
    let lines = if is_test { 0 } else { lines_without_tests(text) };
    if lines > FILE_LINES {
        problems.push(format!(": {lines} lines, at most {FILE_LINES}; tests are not counted"));
    }
    for (index, line) in code.lines().enumerate() {
        let mut report = |problem: &str| problems.push(format!(":{}: {problem}", index + 1));
        for name in UNFINISHED.iter().filter(|name| has_word(line, name)) {
            report(&format!("`{name}` is left over"));
        }
        if line.contains("#[ignore]") {
            report("a test is ignored for no reason: `#[ignore = \"needs …\"]`");
        }
        if line.contains("#![feature(") {
            report("an unstable feature: users build with the stable compiler");
        }
    }
    problems.extend(unsafe_register(&code, is_test));
    problems
}

/// `grep 'allow(unsafe_code'` lists every file with unsafe code, and nothing else.
fn unsafe_register(code: &str, is_test: bool) -> Option<String> {
    let uses = code.lines().position(|line| has_word(line, "unsafe"));
    let squeezed: String = code.split_whitespace().collect();
    let opens = squeezed.contains("#![allow(unsafe_code,reason=");
    let item = is_test && squeezed.contains("#[allow(unsafe_code,reason=");
    match uses {
        Some(line) if !opens && !item => Some(format!(
            ":{}: unsafe code in a file that does not open with `#![allow(unsafe_code, reason = \"…\")]`",
            line + 1
        )),
        None if opens || item => Some(": allows unsafe code and has none".to_owned()),
        _ => None,
    }
}

fn is_test_file(file: &Path) -> bool {
    let in_folder = file.components().any(|part| part.as_os_str() == "tests");
    in_folder || file.file_stem().is_some_and(|stem| stem == "tests")
}

/// Lines outside `#[cfg(test)] mod … { … }`. Relies on rustfmt: such a module ends with a brace in the first column.
fn lines_without_tests(text: &str) -> usize {
    let mut count = 0;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let opens_tests = line == "#[cfg(test)]"
            && lines.peek().is_some_and(|next| next.starts_with("mod ") && next.ends_with('{'));
        if opens_tests {
            lines.by_ref().find(|line| *line == "}");
        } else {
            count += 1;
        }
    }
    count
}

/// Whether a word stands in the line, not as a part of a longer one.
fn has_word(line: &str, word: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        !before.ends_with(part_of_word) && !after.starts_with(part_of_word)
    })
}

/// Whether the line names a path under `/folder/`, from the root of a file system.
fn has_machine_path(line: &str, folder: &str) -> bool {
    let inside = |c: char| c.is_alphanumeric() || "._-~*}$/:".contains(c);
    line.match_indices(&format!("/{folder}/")).any(|(at, _)| !line[..at].ends_with(inside))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lib(text: &str) -> Vec<String> {
        rust(Path::new("crates/quant/src/lib.rs"), text)
    }

    #[test]
    fn unsafe_needs_the_register_and_the_register_needs_unsafe() {
        assert_eq!(lib("fn f() { unsafe { g() } }\n").len(), 1);
        assert!(lib("#![allow(unsafe_code, reason = \"x\")]\nunsafe fn f() {}\n").is_empty());
        assert!(
            lib("#![allow(\n    unsafe_code,\n    reason = \"x\"\n)]\nunsafe fn f() {}\n")
                .is_empty()
        );
        assert_eq!(lib("#![allow(unsafe_code, reason = \"x\")]\nfn f() {}\n").len(), 1);
        assert_eq!(lib("#![allow(unsafe_code)]\nunsafe fn f() {}\n").len(), 1, "no reason");
        assert!(lib("#![forbid(unsafe_code)]\n// unsafe\nfn f() { g(\"unsafe\") }\n").is_empty());
    }

    #[test]
    fn leftovers_are_found_in_code_only() {
        assert_eq!(lib("fn f() { todo!() }\n").len(), 1);
        assert_eq!(lib("#[ignore]\nfn f() {}\n").len(), 1);
        assert!(lib("#[ignore = \"needs MODEL\"]\nfn f() {}\n").is_empty());
        assert!(lib("// dbg! is not allowed\nfn f() { g(\"todo!\") }\n").is_empty());
    }

    #[test]
    fn tests_do_not_count_as_lines() {
        let text = "fn f() {}\n\n#[cfg(test)]\nmod tests {\n    fn g() {\n    }\n}\nfn h() {}\n";
        assert_eq!(lines_without_tests(text), 3);
        let long = "fn f() {}\n".repeat(FILE_LINES + 1);
        assert_eq!(lib(&long).len(), 1);
        assert!(rust(Path::new("crates/quant/src/tests.rs"), &long).is_empty());
    }

    #[test]
    fn a_machine_path_is_absolute() {
        for folder in MACHINE_FOLDERS {
            assert!(has_machine_path(&format!("open(\"/{folder}/me/x\")"), folder));
            assert!(!has_machine_path(&format!("https://example.com/{folder}/x"), folder));
            assert!(!has_machine_path(&format!("docs/{folder}/x"), folder));
        }
    }

    #[test]
    fn text_ends_with_one_newline_and_has_no_stray_space() {
        assert!(text("a\nb\n").is_empty());
        assert_eq!(text("a \nb"), [":1: space at the end of the line", ": no newline at the end"]);
        assert_eq!(text("\ta\n"), [":1: a tab"]);
    }
}
