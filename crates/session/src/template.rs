//! The chat template that the model file carries, rendered the way Hugging Face's tools do.

use std::fmt::Write;

use checkpoint::Metadata;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::Value as Json;

/// Used when the file has no template.
const CHATML: &str = "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Instructions of a rendering: a template that loops forever ends with an error.
const FUEL: u64 = 50_000_000;

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
    /// The template refused, or met something that it cannot handle.
    #[error("the model's chat template refuses these messages: {0}")]
    Render(String),
}

/// What a template is told beside the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// Open the assistant's turn.
    pub add_generation_prompt: bool,
    /// Whether the model may think first; templates that cannot say ignore it.
    pub enable_thinking: Option<bool>,
    /// Tools, as their JSON schemas.
    pub tools: Option<Json>,
    /// Anything else that the template knows.
    pub extra: serde_json::Map<String, Json>,
}

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    is_fallback: bool,
}

impl ChatTemplate {
    /// The template of a model file, or plain ChatML if it has none.
    ///
    /// # Errors
    /// The template cannot be parsed.
    pub fn from_metadata(
        metadata: &Metadata,
        token: impl Fn(u32) -> Option<String>,
    ) -> Result<Self, TemplateError> {
        let special = |name: &str| {
            let id = metadata.u64(&format!("tokenizer.ggml.{name}_token_id"))?;
            token(u32::try_from(id).ok()?)
        };
        let source = metadata.str("tokenizer.chat_template");
        let mut template = Self::parse(source.unwrap_or(CHATML))?;
        template.bos = special("bos").unwrap_or_default();
        template.eos = special("eos").unwrap_or_default();
        template.is_fallback = source.is_none();
        Ok(template)
    }

    /// Parses a template.
    ///
    /// # Errors
    /// [`TemplateError::TooLong`], [`TemplateError::Parse`].
    pub fn parse(source: &str) -> Result<Self, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(TemplateError::TooLong { found: source.len() });
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(TemplateError::Parse)?);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("tojson", to_json);
        environment.add_template_owned("chat", source.to_owned()).map_err(TemplateError::Parse)?;
        Ok(Self { environment, bos: String::new(), eos: String::new(), is_fallback: false })
    }

    /// Whether the file had no template.
    pub const fn is_fallback(&self) -> bool {
        self.is_fallback
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`TemplateError::Render`], with the template's own words.
    ///
    /// # Panics
    /// Never: the template was added when it was parsed.
    pub fn render(
        &self,
        messages: &Json,
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let mut context = options.extra.clone();
        context.insert("messages".to_owned(), messages.clone());
        context.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        context.insert("tools".to_owned(), options.tools.clone().unwrap_or(Json::Null));
        context.insert("bos_token".to_owned(), self.bos.clone().into());
        context.insert("eos_token".to_owned(), self.eos.clone().into());
        if let Some(enable) = options.enable_thinking {
            context.insert("enable_thinking".to_owned(), enable.into());
        }
        let template = self.environment.get_template("chat").expect("added when it was parsed");
        template
            .render(Value::from(Serde(context)))
            .map_err(|error| TemplateError::Render(reason(&error)))
    }
}

/// An error's own words and the line where it arose.
fn reason(error: &Error) -> String {
    let mut text = error.detail().map_or_else(|| error.to_string(), str::to_owned);
    if let Some(line) = error.line() {
        let _ = write!(text, " (line {line} of the template)");
    }
    text
}

/// `tojson` as Python writes it: `, ` and `: ` between, non-ASCII kept, nothing escaped for HTML.
#[allow(clippy::needless_pass_by_value, reason = "the signature of a filter")]
fn to_json(value: Serde<Json>, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut value = value.0;
    if sort_keys == Some(true) {
        value.sort_all_objects();
    }
    let mut text = String::new();
    write_json(&value, indent, 0, &mut text);
    Ok(Value::from_safe_string(text))
}

fn write_json(value: &Json, indent: Option<usize>, depth: usize, out: &mut String) {
    let newline = |out: &mut String, depth: usize| {
        if let Some(width) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    let between = |out: &mut String, i: usize| {
        if i > 0 {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
    };
    match value {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                between(out, i);
                newline(out, depth + 1);
                write_json(item, indent, depth + 1, out);
            }
            newline(out, depth);
            out.push(']');
        }
        Json::Object(map) if !map.is_empty() => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                between(out, i);
                newline(out, depth + 1);
                out.push_str(&Json::String(key.clone()).to_string());
                out.push_str(": ");
                write_json(item, indent, depth + 1, out);
            }
            newline(out, depth);
            out.push('}');
        }
        other => out.push_str(&other.to_string()),
    }
}
