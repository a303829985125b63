//! Just enough of Rust's lexical rules to tell code from comments and literals.

/// The source with comments, string and character literals blanked out, line for line.
///
/// Columns are not kept, lines are. Literals leave their quotes behind.
pub(super) fn code_only(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let at_word = code.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if let Some(length) = raw_string(rest).filter(|_| !at_word) {
            code.push_str("\"\"");
            length
        } else if first == '"' {
            code.push_str("\"\"");
            quoted(rest, '"')
        } else if first == '\'' && is_char_literal(rest) {
            code.push_str("''");
            quoted(rest, '\'')
        } else {
            code.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        };
        code.extend(rest[..skipped].chars().filter(|c| *c == '\n'));
        rest = &rest[skipped..];
    }
    code
}

/// Length of the block comment at the start; they nest.
fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    at
}

/// Length of the raw string (`r"…"`, `br#"…"#`) at the start, if there is one.
fn raw_string(text: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r"].into_iter().find(|prefix| text.starts_with(prefix))?;
    let hashes = text[prefix.len()..].chars().take_while(|c| *c == '#').count();
    let open = prefix.len() + hashes;
    if !text[open..].starts_with('"') {
        return None;
    }
    let close = format!("\"{}", "#".repeat(hashes));
    let body = open + 1;
    Some(text[body..].find(&close).map_or(text.len(), |end| body + end + close.len()))
}

/// Length of the quoted literal at the start, a backslash hiding the character after it.
fn quoted(text: &str, quote: char) -> usize {
    let mut hidden = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if hidden => hidden = false,
            '\\' => hidden = true,
            _ if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// Tells `'a'` and `'\n'` from the lifetime `'a`.
fn is_char_literal(text: &str) -> bool {
    let mut chars = text.chars().skip(1);
    matches!((chars.next(), chars.next()), (Some('\\'), _) | (Some(_), Some('\'')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, expected: &str) {
        assert_eq!(code_only(source), expected);
    }

    #[test]
    fn comments_vanish_and_lines_stay() {
        check("a // unsafe\nb", "a \nb");
        check("a /* x /* y */\n z */ b", "a \n b");
        check("a // no end", "a ");
    }

    #[test]
    fn literals_are_blanked() {
        check(r#"f("unsafe \" x") + 1"#, r#"f("") + 1"#);
        check(r##"f(r#"a "b" c"#)"##, r#"f("")"#);
        check("f(b\"x\", 'y', '\\'', \"\u{e9}\")", "f(b\"\", '', '', \"\")");
    }

    #[test]
    fn a_lifetime_is_no_literal() {
        check("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}");
    }

    #[test]
    fn a_word_that_ends_in_r_opens_no_raw_string() {
        check(r#"expr"x" y"#, r#"expr"" y"#);
    }
}
