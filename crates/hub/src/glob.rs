//! Patterns over paths, as shells and other download tools have them: `*`, `?`, `[a-z]`, `[!0-9]`.
//!
//! A star matches slashes too, so `*Q4_K_M*` finds a file wherever it lies. Matching never backtracks over more than the
//! last star, so its time is at most pattern times path.

/// Whether the whole of `path` matches.
pub(crate) fn matches(pattern: &str, path: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let path: Vec<char> = path.chars().collect();
    let (mut p, mut t) = (0, 0);
    // Where to go on when the rest does not fit: after the last star, one character further.
    let mut retry: Option<(usize, usize)> = None;
    while t < path.len() {
        if pattern.get(p) == Some(&'*') {
            p += 1;
            retry = Some((p, t));
        } else if let Some(length) = one(&pattern[p..], path[t]) {
            p += length;
            t += 1;
        } else if let Some((star, from)) = retry {
            (p, t) = (star, from + 1);
            retry = Some((star, from + 1));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// How much of the pattern one character takes up, or `None` if it does not match.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern {
        [] => None,
        ['?', ..] => Some(1),
        ['[', rest @ ..] => match class(rest) {
            Some((length, inside)) => inside(c).then_some(length + 1),
            // Without its end it is an ordinary bracket.
            None => (c == '[').then_some(1),
        },
        [first, ..] => (*first == c).then_some(1),
    }
}

/// A class after its opening bracket: its length with the closing one, and what it holds.
fn class(text: &[char]) -> Option<(usize, impl Fn(char) -> bool)> {
    let negated = matches!(text.first(), Some('!' | '^'));
    let start = usize::from(negated);
    // A bracket right at the beginning is a member.
    let end = start + 1 + text.get(start + 1..)?.iter().position(|c| *c == ']')?;
    let members = text[start..end].to_vec();
    let inside = move |c: char| {
        let mut at = 0;
        let mut found = false;
        while at < members.len() {
            if let [low, '-', high, ..] = members[at..] {
                found |= (low..=high).contains(&c);
                at += 3;
            } else {
                found |= members[at] == c;
                at += 1;
            }
        }
        found != negated
    };
    Some((end + 1, inside))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pattern: &str, path: &str, expected: bool) {
        assert_eq!(matches(pattern, path), expected, "{pattern} on {path}");
    }

    #[test]
    fn stars_match_any_run_and_slashes() {
        check("*Q4_K_M*", "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", true);
        check("*.gguf", "a/b.gguf", true);
        check("*.gguf", "a/b.gguf.bin", false);
        check("a*b*c", "aXXbYYbZc", true);
        check("a*b*c", "aXXbYYbZ", false);
        check("**", "", true);
        check("", "", true);
        check("", "a", false);
    }

    #[test]
    fn classes_hold_ranges_and_negations() {
        check("m-Q[45]_0.gguf", "m-Q5_0.gguf", true);
        check("m-Q[45]_0.gguf", "m-Q8_0.gguf", false);
        check("[!a-c]x", "dx", true);
        check("[!a-c]x", "bx", false);
        check("[]]", "]", true);
        check("[ab", "[ab", true);
        check("?", "é", true);
    }

    #[test]
    fn a_pattern_full_of_stars_ends_in_time() {
        let path = "a".repeat(2000);
        check(&"a*".repeat(500), &format!("{path}b"), true);
        check(&format!("{}c", "a*".repeat(500)), &path, false);
    }
}
