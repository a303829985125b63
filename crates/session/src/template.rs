//! The chat template that the model file carries, rendered the way Hugging Face's tools do.
//!
//! A template is a program from a file. It sees nothing but the messages and options, it cannot run for ever (fuel), it
//! cannot make more text than a limit, and its values stay shallow and small ([`bounds`]): minijinja follows them
//! recursively. Tags and chains of tags are short for the same reason, and what recursion is left runs on a thread of
//! its own, whose stack is larger than that of the thread that asks.

mod bounds;
mod clock;
mod json;

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use checkpoint::Metadata;
use minijinja::machinery::{self, CompiledTemplate, TemplateConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

/// Used when the file has no template.
const CHATML: &str = "\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

/// Bytes of a template; the longest public ones have 20,000.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Bytes of a rendered conversation, and of one value in it as JSON.
const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// Steps of a rendering, and one more for each 64 bytes that it makes: a conversation of 5,000 messages takes a tenth.
const FUEL: u64 = 5_000_000;
/// Stack of the thread that parses and renders. The deepest template that passes the limits needs a quarter in a debug
/// build.
const STACK_BYTES: usize = 16 << 20;

/// Why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template is longer than any real one.
    #[error(
        "the model's chat template has {found} bytes; at most {MAX_TEMPLATE_BYTES} are accepted"
    )]
    TooLong {
        /// Bytes.
        found: usize,
    },
    /// The template is malformed.
    #[error(
        "the model's chat template cannot be parsed: {0}\n\nhint: `--raw` continues a prompt without a template"
    )]
    Parse(Error),
    /// The rendered conversation is longer than any context.
    #[error(
        "the model's chat template makes more than {MAX_OUTPUT_BYTES} bytes of text of these messages\n\nhint: `--raw` continues a prompt without a template"
    )]
    TooMuchText,
    /// The template does not come to an end.
    #[error(
        "the model's chat template takes too many steps for these messages\n\nhint: `--raw` continues a prompt without a template"
    )]
    TooManySteps,
    /// The template refused, or met something that it cannot handle.
    #[error("the model's chat template refuses these messages: {0}")]
    Render(String),
    /// The system gives no thread.
    #[error("no thread could be started to render the chat template: {0}")]
    Thread(io::Error),
}

/// One message of a conversation, as templates know it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`: what the template accepts.
    pub role: String,
    /// Text, a list of parts, or null.
    #[serde(default)]
    pub content: Json,
    /// What the model thought before the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<Json>,
    /// Calls that the model made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Json>,
    /// The call that this message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<Json>,
    /// Anything else that the template knows.
    #[serde(flatten)]
    pub extra: Map<String, Json>,
}

impl Message {
    /// A message of text.
    pub fn text(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.to_owned(), content: Json::String(content.into()), ..Self::default() }
    }
}

/// What a template is told beside the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// Open the assistant's turn.
    pub add_generation_prompt: bool,
    /// Whether the model may think first; templates that cannot say ignore it.
    pub enable_thinking: Option<bool>,
    /// Tools, as their JSON schemas; `none` for the template if absent.
    pub tools: Option<Json>,
    /// Anything else that the template knows.
    pub extra: Map<String, Json>,
}

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    is_fallback: bool,
}

impl ChatTemplate {
    /// The template of a model file, or plain ChatML if it has none (see [`Self::is_fallback`]).
    ///
    /// - `token`: the text of a token, for `bos_token` and `eos_token`
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn from_metadata(
        metadata: &Metadata,
        token: impl Fn(u32) -> Option<String>,
    ) -> Result<Self, TemplateError> {
        let special = |name: &str| {
            let id = metadata.u64(&format!("tokenizer.ggml.{name}_token_id"))?;
            token(u32::try_from(id).ok()?)
        };
        let source = metadata.str("tokenizer.chat_template");
        Ok(Self {
            bos: special("bos").unwrap_or_default(),
            eos: special("eos").unwrap_or_default(),
            is_fallback: source.is_none(),
            ..Self::parse(source.unwrap_or(CHATML))?
        })
    }

    /// Parses a template.
    ///
    /// # Errors
    /// [`TemplateError::TooLong`], [`TemplateError::Parse`].
    pub fn parse(source: &str) -> Result<Self, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(TemplateError::TooLong { found: source.len() });
        }
        let source = without_generation_tags(source).into_owned();
        on_thread(|| compile(&source).map(drop))?.map_err(TemplateError::Parse)?;
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("tojson", json::to_json);
        environment.add_filter("fromjson", json::from_json);
        bounds::install(&mut environment);
        Ok(Self { environment, source, bos: String::new(), eos: String::new(), is_fallback: false })
    }

    /// Gives the template a clock, in UTC. Without one it has no `strftime_now` and the same messages give the same
    /// text for ever; templates that can do without ask whether it is defined.
    #[must_use]
    pub fn with_clock(mut self, now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.environment
            .add_function("strftime_now", move |format: String| clock::format(now(), &format));
        self
    }

    /// Whether the file had no template.
    pub const fn is_fallback(&self) -> bool {
        self.is_fallback
    }

    /// Renders a conversation.
    ///
    /// - `messages`: a list of [`Message`], or JSON of that form
    ///
    /// What a message contains goes into the text as it is: see [`crate::Specials`].
    ///
    /// # Errors
    /// [`TemplateError::Render`] with the template's own words, [`TemplateError::TooMuchText`],
    /// [`TemplateError::TooManySteps`], [`TemplateError::Thread`].
    pub fn render<M: Serialize + ?Sized>(
        &self,
        messages: &M,
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let messages = serde_json::to_value(messages)
            .map_err(|error| TemplateError::Render(error.to_string()))?;
        let mut context = options.extra.clone();
        context.insert("messages".to_owned(), messages);
        context.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        context.insert("tools".to_owned(), options.tools.clone().unwrap_or(Json::Null));
        context.insert("bos_token".to_owned(), self.bos.as_str().into());
        context.insert("eos_token".to_owned(), self.eos.as_str().into());
        if let Some(enable) = options.enable_thinking {
            context.insert("enable_thinking".to_owned(), enable.into());
        }
        match on_thread(|| self.text(context))? {
            Ok(text) if text.len() > MAX_OUTPUT_BYTES => Err(TemplateError::TooMuchText),
            Ok(text) => Ok(text),
            Err(error) => Err(match error.kind() {
                ErrorKind::OutOfFuel => TemplateError::TooManySteps,
                _ => TemplateError::Render(reason(&error)),
            }),
        }
    }

    /// What the template makes of its variables; fuel bounds how much.
    fn text(&self, context: Map<String, Json>) -> Result<String, Error> {
        let template = compile(&self.source)?;
        let main = bounds::checked(&template.instructions);
        let blocks =
            template.blocks.iter().map(|(name, block)| (*name, bounds::checked(block))).collect();
        let context = Value::from(Serde(context));
        let mut text = String::new();
        let mut output = machinery::make_string_output(&mut text);
        machinery::eval(
            &self.environment,
            &main,
            context,
            &blocks,
            &mut output,
            template.initial_auto_escape,
        )?;
        Ok(text)
    }
}

/// Compiles a template; its values are unchecked as yet.
fn compile(source: &str) -> Result<CompiledTemplate<'_>, Error> {
    let syntax_config = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    bounds::check_source(source, syntax_config.clone())?;
    let default_auto_escape = Arc::new(|_: &str| AutoEscape::None);
    CompiledTemplate::new("chat", source, &TemplateConfig { syntax_config, default_auto_escape })
}

/// Runs something that recurses with enough stack.
fn on_thread<T: Send>(run: impl FnOnce() -> T + Send) -> Result<T, TemplateError> {
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("template".to_owned());
        let thread = builder
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, run)
            .map_err(TemplateError::Thread)?;
        let failed = |_| TemplateError::Render("the template engine failed".to_owned());
        thread.join().map_err(failed)
    })
}

/// An error's own words and the line where it arose.
fn reason(error: &Error) -> String {
    let mut text = error.detail().map_or_else(|| error.to_string(), str::to_owned);
    if let Some(line) = error.line() {
        let _ = write!(text, " (line {line} of the template)");
    }
    text
}

/// `{% generation %}` marks text for training. It means nothing here: an `if true` takes its place and keeps the rules
/// for white space.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some((tag, after)) = tag.find("%}").map(|end| tag.split_at(end + 2)) else {
            rest = tag;
            break;
        };
        match tag.trim_matches(['{', '%', '}', '-', '+']).trim() {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    if out.len() + rest.len() == source.len() && out == source[..out.len()] {
        return Cow::Borrowed(source);
    }
    out.push_str(rest);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, TemplateError> {
        let messages = [Message::text("user", "hi")];
        ChatTemplate::parse(source)?.render(&messages, &RenderOptions::default())
    }

    fn check(source: &str, expected: &str) {
        assert_eq!(render(source).unwrap(), expected, "{source}");
    }

    #[test]
    fn messages_and_options_are_what_the_template_sees() {
        let source = "{{ messages|tojson }} {{ tools is none }} {{ enable_thinking is defined }} \
                      {{ add_generation_prompt }} {{ mood }}";
        let template = ChatTemplate::parse(source).unwrap();
        let mut call = Message::text("assistant", "x");
        call.tool_calls = Some(Json::from(vec![1]));
        let mut options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        options.extra.insert("mood".to_owned(), "good".into());
        let expected =
            r#"[{"role": "assistant", "content": "x", "tool_calls": [1]}] True False True good"#;
        assert_eq!(template.render(&[call], &options).unwrap(), expected);
    }

    #[test]
    fn a_message_reads_back_from_json() {
        let json = r#"{"role":"tool","content":null,"tool_call_id":"1","name":"f"}"#;
        let message: Message = serde_json::from_str(json).unwrap();
        assert_eq!(message.extra["name"], "f");
        assert_eq!(serde_json::to_string(&message).unwrap(), json);
    }

    #[test]
    fn white_space_follows_the_rules_of_public_templates() {
        check("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc");
        check("a {%- if true %} b {% endif -%} c", "a b c");
    }

    #[test]
    fn marks_for_training_are_ignored() {
        check("a {%- generation -%} b {% endgeneration %} {{ '{%' }} c", "ab  {% c");
        check(
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            "hi",
        );
    }

    #[test]
    fn a_template_speaks_for_itself_when_it_refuses() {
        let error = render("\n{{ raise_exception('no ' ~ messages[0].role) }}").unwrap_err();
        let expected =
            "the model's chat template refuses these messages: no user (line 2 of the template)";
        assert_eq!(error.to_string(), expected);
        assert!(matches!(render("{{ messages[5].role }}"), Err(TemplateError::Render(_))));
        assert!(matches!(render("{% if %}"), Err(TemplateError::Parse(_))));
        let long = " ".repeat(MAX_TEMPLATE_BYTES + 1);
        assert!(matches!(render(&long), Err(TemplateError::TooLong { .. })));
    }

    #[test]
    fn a_hostile_template_ends_with_an_error() {
        let loops =
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
        assert!(matches!(render(loops), Err(TemplateError::TooManySteps)));
        assert!(matches!(
            render("{{ range(1000000000) | list }}"),
            Err(TemplateError::TooManySteps)
        ));
        let text = "{% set x = 'x' * 1000000 %}{% for i in range(99) %}{{ x }}{% endfor %}";
        assert!(matches!(render(text), Err(TemplateError::TooMuchText)));
        for source in [
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{% set x = 'x' * 99999999999 %}",
            "{% set ns = namespace(x=[]) %}{% for i in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
            "{% set ns = namespace(x=[]) %}{% for i in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
            "{% set ns = namespace(x=[]) %}{% for i in range(900) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
            "{% include 'chat' %}",
        ] {
            assert!(render(source).is_err(), "{source}");
        }
    }

    /// Ways to make a value deeper, larger or endless, in a loop that ends long after any stack would.
    #[test]
    fn a_value_put_into_itself_is_an_error_however_it_is_done() {
        let steps = [
            "[ns.x]",
            "(ns.x,)",
            "{'a': ns.x}",
            "dict(a=ns.x)",
            "[[ns.x], 1]|list",
            "[ns.x, ns.x]",
            "[ns.x] + [ns.x]",
            "ns.x|batch(1)",
            "[ns.x]|zip",
            "[ns.x]|map('list')",
            "{'a': ns.x}.items()",
            "ns",
            "[ns]",
            "namespace(x=ns)",
            "namespace(x=ns.x)",
            "m",
            "loop",
        ];
        for step in steps {
            for print in
                ["{{ ns.x }}", "{% set y %}{{ ns.x }}{% endset %}", "{{ (ns.x ~ '')|length }}", ""]
            {
                let source = format!(
                    "{{% macro m() %}}{{% endmacro %}}{{% set ns = namespace(x=[1]) %}}\
                     {{% for i in range(99999) %}}{{% set ns.x = {step} %}}{{% endfor %}}{print}"
                );
                let error = render(&source).unwrap_err().to_string();
                let bounds = ["more than 160 deep", "may not be put into another value"];
                assert!(bounds.iter().any(|bound| error.contains(bound)), "{source}: {error}");
            }
        }
    }

    #[test]
    fn promises_of_items_do_not_nest() {
        for step in [
            "ns.x[:]",
            "ns.x|reverse",
            "ns.x + []",
            "ns.x|map('string')",
            "ns.x|chain([])",
            "ns.x|list",
        ] {
            let source = format!(
                "{{% set ns = namespace(x=['a']) %}}{{% for i in range(20000) %}}{{% set ns.x = {step} %}}{{% endfor %}}{{{{ ns.x }}}}"
            );
            assert_eq!(render(&source).unwrap(), "['a']", "{source}");
        }
    }

    #[test]
    fn long_tags_and_chains_of_tags_are_refused() {
        for source in [
            format!("{{{{ a{} }}}}", ".b".repeat(100_000)),
            format!("{{{{ a{} }}}}", "|e".repeat(100_000)),
            format!("{{{{ a{} }}}}", "+a".repeat(100_000)),
            format!("{{% if a %}}{}{{% endif %}}", "{%elif a%}".repeat(50_000)),
        ] {
            assert!(matches!(render(&source), Err(TemplateError::Parse(_))));
        }
        let deepest = format!(
            "{{% if a %}}{}{{{{ ''{} }}}}{{% endif %}}",
            "{%elif not a%}".repeat(999),
            "+''".repeat(990)
        );
        assert_eq!(render(&deepest).unwrap(), "");
    }

    #[test]
    fn ranges_are_those_of_python() {
        check("{{ range(3) }}{{ range(-3) }}{{ range(1, 3) }}", "[0, 1, 2][][1, 2]");
        check("{{ range(0, 5, 2) }}{{ range(0, 6, 2) }}{{ range(5, 0) }}", "[0, 2, 4][0, 2, 4][]");
        check(
            "{{ range(5, 0, -2) }}{{ range(4, 0, -2) }}{{ range(0, 5, -1) }}",
            "[5, 3, 1][4, 2][]",
        );
        let ends = "9223372036854775807, -9223372036854775807";
        check(
            &format!("{{{{ range({ends}, -9223372036854775807) }}}}"),
            "[9223372036854775807, 0]",
        );
        assert!(matches!(
            render(&format!("{{{{ range({ends}, -1) }}}}")),
            Err(TemplateError::TooManySteps)
        ));
        assert!(matches!(render("{{ range(1, 2, 0) }}"), Err(TemplateError::Render(_))));
    }

    #[test]
    fn ordinary_values_pass_the_checks() {
        check(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "1",
        );
        check(
            "{% for g in [{'a': 1}, {'a': 2}]|groupby('a') %}{{ g.grouper }}{{ g.list }}{% endfor %}",
            "1[{'a': 1}]2[{'a': 2}]",
        );
        check(
            "{% macro m(ns, x) %}{% set ns.y = x[1:] %}{{ ns.y }}{% endmacro %}{% set ns = namespace() %}{{ m(ns, [1, 2]) }}",
            "[2]",
        );
        check(
            "{% for k, v in {'a': [1]}.items() %}{{ k }}{{ v }}{{ loop.index }}{% endfor %}",
            "a[1]1",
        );
        check(
            "{{ messages[::-1]|map(attribute='role')|list }}{{ (1, 2) + (3,) }}",
            "['user'](1, 2, 3)",
        );
        check(
            "{% for x in [[1, [2]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
            "(1(2))",
        );
        check(
            "{% macro m() %}{{ caller(3) }}{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}",
            "3",
        );
        check("{% block b %}{{ [1, 2][0] if true else [] }}{% endblock %}{{ self.b() }}", "11");
    }

    #[test]
    fn a_long_conversation_is_within_the_limits() {
        let source = "{% for m in messages %}{% for n in messages[::-1] %}{% break %}{% endfor %}\
                      {{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}";
        let message = Message::text("user", "word ".repeat(100));
        let messages = vec![message; 5000];
        let text =
            ChatTemplate::parse(source).unwrap().render(&messages, &RenderOptions::default());
        assert_eq!(text.unwrap().matches("<|im_start|>").count(), 5000);
    }

    #[test]
    fn a_file_without_a_template_gets_plain_chatml() {
        let template = ChatTemplate::from_metadata(&Metadata::default(), |_| None).unwrap();
        assert!(template.is_fallback());
        let messages = [
            Message::text("user", "hi"),
            Message { content: Json::Null, ..Message::text("assistant", "") },
        ];
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(template.render(&messages, &options).unwrap(), expected);
    }

    #[test]
    fn the_file_names_its_begin_and_end_tokens() {
        use checkpoint::MetaValue;
        let mut metadata = Metadata::default();
        let source = "{{ bos_token }}{{ eos_token }}";
        metadata.insert("tokenizer.chat_template".to_owned(), MetaValue::String(source.to_owned()));
        metadata.insert("tokenizer.ggml.eos_token_id".to_owned(), MetaValue::U64(7));
        let template =
            ChatTemplate::from_metadata(&metadata, |id| Some(format!("<{id}>"))).unwrap();
        let none: [Message; 0] = [];
        assert_eq!(template.render(&none, &RenderOptions::default()).unwrap(), "<7>");
        assert!(!template.is_fallback());
    }

    #[test]
    fn time_comes_only_from_the_clock_that_was_given() {
        let source = "{{ strftime_now('%d %B %Y') if strftime_now is defined else 'never' }}";
        check(source, "never");
        let template = ChatTemplate::parse(source).unwrap().with_clock(|| SystemTime::UNIX_EPOCH);
        let none: [Message; 0] = [];
        assert_eq!(template.render(&none, &RenderOptions::default()).unwrap(), "01 January 1970");
    }
}
