//! Keeps the values of a template small, shallow and free of cycles.
//!
//! minijinja follows values recursively when it prints, compares or drops them, and has no limit of its own. A template
//! that puts a list into itself in a loop would overflow the stack, one that doubles it would print for ever, and a
//! namespace that holds itself has no end at all. So the compiled template gets checks between its instructions:
//!
//! - after what makes a value: containers are at most [`MAX_DEPTH`] deep and print as at most [`MAX_OUTPUT_BYTES`];
//!   those that only promise their items (slices, `map`, `a + b`) become lists, since promises nest too; but not
//!   the slice that a loop runs over and forgets
//! - before an attribute of a namespace is set: no namespace may hold one, nor a list that a value is made of
//! - after a namespace is looked up as a value: all that it holds prints within the same limit
//!
//! Between two checks a value grows by one level. A template cannot name the checks: they are no identifiers.

use minijinja::machinery::{Instruction, Instructions, Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use super::MAX_OUTPUT_BYTES;

/// Containers inside containers. Requests arrive as JSON, whose reader stops at 128.
const MAX_DEPTH: usize = 160;
/// Tokens between two braces of a tag: a chain such as `a.b.c` or `a|b|c` is compiled recursively. Public templates
/// stay below 200.
const MAX_TAG_TOKENS: usize = 2000;
/// `elif`s in a template: each is compiled inside the one before. Public templates have below 50.
const MAX_ELIFS: usize = 1000;
/// Containers that are visited for a step.
const VISITS_PER_FUEL: u64 = 8;
/// Bytes that a scalar or a container counts for, and once more for every level above it when it is indented.
const NODE_BYTES: usize = 8;

/// Numbers of a `range`.
const MAX_RANGE: i128 = 100_000;

/// Whether a new value must be replaced by a plain one.
const IS_LAZY: &str = "lazy-value";
/// As [`IS_LAZY`], for parts of a value that was checked.
const IS_PART: &str = "lazy-part";
/// The plain form of a value.
const PLAIN: &str = "plain-value";
/// The plain form of a part.
const PLAIN_PART: &str = "plain-part";
/// Refuses what a namespace must not hold.
const IS_STORABLE: &str = "storable-value";
/// Refuses a namespace that is too large to be a value.
const IS_SMALL: &str = "small-namespace";
/// What `groupby` makes.
const GROUP: &str = "::GroupTuple";
/// No cached place of a test.
const NOT_CACHED: u8 = u8::MAX;

/// Refuses templates that are compiled more deeply than real ones.
///
/// # Errors
/// A tag or a chain of `elif` is too long. Malformed templates pass: the parser says what is wrong.
pub(super) fn check_source(source: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    let [mut tag, mut elifs] = [0; 2];
    for token in tokenize(source, false, syntax) {
        let Ok((token, span)) = token else { break };
        match token {
            Token::VariableStart | Token::BlockStart => tag = 0,
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        tag += 1;
        if tag > MAX_TAG_TOKENS || elifs > MAX_ELIFS {
            let line = span.start_line;
            return Err(Error::new(
                ErrorKind::SyntaxError,
                format!(
                    "at line {line}: more than {MAX_TAG_TOKENS} tokens in a tag, or more than {MAX_ELIFS} `elif`s"
                ),
            ));
        }
    }
    Ok(())
}

/// Gives an environment what [`checked`] templates call, and takes away what makes values that cannot be checked.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.remove_global("debug");
    environment.remove_filter("pprint");
    environment.add_function("range", range);
    environment.add_test(IS_LAZY, |state: &State, value: &Value| -> Result<bool, Error> {
        Ok(is_lazy(value) || Visit::new().run(state, value)?.is_some())
    });
    environment.add_test(IS_PART, is_lazy);
    environment.add_test(IS_STORABLE, |value: &Value| -> Result<bool, Error> {
        if value.as_object().is_none() || is_plain(value) { Ok(true) } else { Err(foreign(value)) }
    });
    environment.add_test(IS_SMALL, |state: &State, value: &Value| -> Result<bool, Error> {
        if is_namespace(value) {
            Visit::new().run(state, value)?;
        }
        Ok(true)
    });
    environment.add_function(PLAIN, |state: &State, value: Value| -> Result<Value, Error> {
        Ok(Visit::new().run(state, &value)?.unwrap_or(value))
    });
    environment.add_function(PLAIN_PART, |state: &State, value: Value| -> Result<Value, Error> {
        let items: Vec<Value> = value.try_iter()?.collect();
        state.consume_fuel(items.len() as u64 / VISITS_PER_FUEL)?;
        Ok(Value::from(items))
    });
}

/// `range(end)`, `range(start, end)`, `range(start, end, step)`.
///
/// # Errors
/// A step of 0; or more numbers than a template has steps, as if it had counted them.
fn range(first: i64, end: Option<i64>, step: Option<i64>) -> Result<Vec<i64>, Error> {
    let (start, end) = end.map_or((0, first), |end| (first, end));
    let step = step.unwrap_or(1);
    let [from, to, by] = [start, end, step].map(i128::from);
    let len = match by {
        0 => return Err(refused("range: a step of 0".to_owned())),
        1.. => (to - from + by - 1).div_euclid(by),
        _ => (from - to - by - 1).div_euclid(-by),
    };
    if len > MAX_RANGE {
        return Err(ErrorKind::OutOfFuel.into());
    }
    // In between: no multiple leaves the numbers that start and end are of.
    Ok((0..len.max(0)).map(|i| (from + i * by) as i64).collect())
}

/// A compiled template with the checks.
pub(super) fn checked<'a>(plain: &Instructions<'a>) -> Instructions<'a> {
    let mut places = Vec::new();
    let mut place = 0;
    while let Some(instruction) = plain.get(places.len() as u32) {
        places.push(place);
        let next = plain.get(places.len() as u32);
        place += Check::of(instruction, next).map_or(1, Check::instructions);
    }
    places.push(place);
    let mut out = Instructions::new(plain.name(), plain.source());
    for at in 0..places.len() as u32 - 1 {
        let Some(instruction) = plain.get(at) else { break };
        let moved = moved(instruction.clone(), &places);
        let mut add = |instruction| match (plain.get_span(at), plain.get_line(at)) {
            (Some(span), _) => out.add_with_span(instruction, span),
            (None, line) => out.add_with_line(instruction, line.unwrap_or(0) as u16),
        };
        match Check::of(instruction, plain.get(at + 1)) {
            Some(check) => check.write(moved, places[at as usize + 1], &mut add),
            None => {
                add(moved);
            }
        }
    }
    out
}

/// An instruction whose jump leads to the new place of the old target.
fn moved<'a>(mut instruction: Instruction<'a>, places: &[u32]) -> Instruction<'a> {
    use Instruction as I;
    match &mut instruction {
        I::Jump(to)
        | I::JumpIfFalse(to)
        | I::JumpIfFalseOrPop(to)
        | I::JumpIfTrueOrPop(to)
        | I::Iterate(to)
        | I::BuildMacro(_, to, _) => *to = places.get(*to as usize).copied().unwrap_or(*to),
        _ => {}
    }
    instruction
}

/// What is checked at an instruction.
#[derive(Clone, Copy)]
enum Check {
    /// The value that it makes.
    Value { test: &'static str, function: &'static str },
    /// The value that it stores, which lies under the namespace.
    Stored,
    /// The namespace that it may have looked up.
    LookedUp,
}

impl Check {
    fn of(instruction: &Instruction<'_>, next: Option<&Instruction<'_>>) -> Option<Self> {
        use Instruction as I;
        match instruction {
            I::BuildMap(_)
            | I::BuildList(_)
            | I::BuildTuple(_)
            | I::Add
            | I::Mul
            | I::ApplyFilter(..)
            | I::CallFunction(..)
            | I::CallMethod(..)
            | I::CallObject(_) => Some(Self::Value { test: IS_LAZY, function: PLAIN }),
            // A loop over a slice keeps nothing of it.
            I::Slice if matches!(next, Some(I::PushLoop(_))) => None,
            I::Slice => Some(Self::Value { test: IS_PART, function: PLAIN_PART }),
            I::SetAttr(_) => Some(Self::Stored),
            I::Lookup(_) if !matches!(next, Some(I::GetAttr(_) | I::SetAttr(_))) => {
                Some(Self::LookedUp)
            }
            _ => None,
        }
    }

    /// The instruction itself and those that check it.
    const fn instructions(self) -> u32 {
        match self {
            Self::Value { .. } => 5,
            Self::Stored => 6,
            Self::LookedUp => 4,
        }
    }

    /// - `end`: where the next instruction begins
    fn write<'a>(
        self,
        checked: Instruction<'a>,
        end: u32,
        add: &mut impl FnMut(Instruction<'a>) -> u32,
    ) {
        use Instruction as I;
        let test = |name| I::PerformTest(name, Some(1), NOT_CACHED);
        match self {
            Self::Value { test: name, function } => {
                add(checked);
                add(I::DupTop);
                add(test(name));
                add(I::JumpIfFalse(end));
                add(I::CallFunction(function, Some(1)));
            }
            Self::Stored => {
                add(I::Swap);
                add(I::DupTop);
                add(test(IS_STORABLE));
                add(I::DiscardTop);
                add(I::Swap);
                add(checked);
            }
            Self::LookedUp => {
                add(checked);
                add(I::DupTop);
                add(test(IS_SMALL));
                add(I::DiscardTop);
            }
        }
    }
}

/// A walk through a value and all values in it.
struct Visit {
    bytes: usize,
    nodes: u64,
}

impl Visit {
    const fn new() -> Self {
        Self { bytes: 0, nodes: 0 }
    }

    /// The plain form of a value, if it is another one.
    fn run(&mut self, state: &State, value: &Value) -> Result<Option<Value>, Error> {
        let plain = self.value(value, 0);
        state.consume_fuel(self.nodes / VISITS_PER_FUEL)?;
        plain
    }

    fn value(&mut self, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
        self.nodes += 1;
        self.bytes += match value.kind() {
            ValueKind::String => value.as_str().map_or(0, str::len),
            // Lossy text has up to three bytes for one.
            ValueKind::Bytes => value.as_bytes().map_or(0, |bytes| 3 * bytes.len()),
            _ => NODE_BYTES * (1 + depth),
        };
        if self.bytes > MAX_OUTPUT_BYTES || depth > MAX_DEPTH {
            return Err(refused(format!(
                "a value prints as more than {MAX_OUTPUT_BYTES} bytes or is more than {MAX_DEPTH} deep"
            )));
        }
        if value.kind() == ValueKind::Invalid {
            return Err(refused(value.to_string()));
        }
        if value.as_object().is_none() {
            return Ok(None);
        }
        if is_plain(value) || is_lazy(value) || depth == 0 && is_namespace(value) {
            return self.container(value, depth);
        }
        if depth == 0 { Ok(None) } else { Err(foreign(value)) }
    }

    fn container(&mut self, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
        let is_map = value.kind() == ValueKind::Map;
        let mut items = Vec::new();
        // A group promises its items, but from a list of its own.
        let is_group = type_has(value, GROUP);
        let mut is_same = !is_lazy(value);
        for item in value.try_iter()? {
            let key = self.value(&item, depth + 1)?;
            is_same &= key.is_none();
            let held = is_map.then(|| value.get_item(&item)).transpose()?;
            let plain = held.as_ref().map(|held| self.value(held, depth + 1)).transpose()?;
            is_same &= !matches!(plain, Some(Some(_)));
            items.push((key.unwrap_or(item), plain.flatten().or(held)));
        }
        if is_same || is_group {
            return Ok(None);
        }
        if is_map {
            let pairs = items.into_iter().map(|(key, held)| (key, held.unwrap_or_default()));
            return Ok(Some(pairs.collect()));
        }
        let items: Vec<Value> = items.into_iter().map(|(item, _)| item).collect();
        Ok(Some(if value.is_tuple() {
            Value::from(Tuple::from(items))
        } else {
            Value::from(items)
        }))
    }
}

/// Containers that hold their items.
fn is_plain(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Seq => {
            value.is_tuple()
                || value.downcast_object_ref::<Vec<Value>>().is_some()
                || type_has(value, GROUP)
        }
        ValueKind::Map => type_has(value, "Map<minijinja::value::Value, minijinja::value::Value"),
        _ => false,
    }
}

/// Containers that make their items when they are asked, also from other such containers.
fn is_lazy(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Iterable => true,
        ValueKind::Seq => !is_plain(value),
        ValueKind::Map => type_has(value, "::MergeDict"),
        _ => false,
    }
}

fn is_namespace(value: &Value) -> bool {
    type_has(value, "::Namespace")
}

/// The types of minijinja are private; their names are kept by the tests below.
fn type_has(value: &Value, name: &str) -> bool {
    value.as_object().is_some_and(|object| object.type_name().contains(name))
}

fn foreign(value: &Value) -> Error {
    refused(format!(
        "a namespace, a macro or a loop ({}) may not be put into another value",
        value.kind()
    ))
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}
