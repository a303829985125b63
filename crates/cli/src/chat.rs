//! A conversation on the terminal.

use std::io::{ErrorKind, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};
use session::{
    ChatTemplate, Engine, Finish, GenerateError, Generated, Limits, Prompt, PromptError, Receipt,
    RenderOptions, Sampler, SamplerConfig, Sequence, Specials, TextStream, generate,
};
use units::ExpertKey;

use crate::args::RunArgs;
use crate::hot::HotFile;
use crate::output::OutputFile;
use crate::{interrupt, report};

const HELP: &str = "\
/help   this text
/stats  counters of the last answer
/reset  forget the conversation
/exit   end (also Ctrl-D)
Ctrl-C stops an answer; twice ends the program.";

/// An engine with a conversation.
pub(crate) struct Chat<'a> {
    engine: Engine,
    args: &'a RunArgs,
    template: ChatTemplate,
    sampler: Sampler,
    sequence: Sequence,
    messages: Vec<Value>,
    last: Option<Receipt>,
    hot: Option<HotFile>,
    /// Experts to read in idle time, the hottest first.
    hottest: Vec<ExpertKey>,
}

impl<'a> Chat<'a> {
    pub(crate) fn open(
        mut engine: Engine,
        args: &'a RunArgs,
        sampler: SamplerConfig,
        hot: Option<HotFile>,
    ) -> Result<Self> {
        let hottest = hot.as_ref().map_or_else(Vec::new, |hot| hot.order(&engine));
        engine.network.preload(&hottest);
        let tokenizer = &engine.tokenizer;
        let token = |id| tokenizer.decode(&[id]).ok();
        let template = ChatTemplate::from_metadata(&engine.checkpoint.metadata, token)?;
        if template.is_fallback() && !args.raw {
            report::note("warning: the model has no chat template; plain ChatML is used");
        }
        let sampler = Sampler::new(sampler)?;
        let sequence = engine.open_sequence()?;
        let mut chat = Self {
            engine,
            args,
            template,
            sampler,
            sequence,
            messages: Vec::new(),
            last: None,
            hot,
            hottest,
        };
        chat.reset();
        Ok(chat)
    }

    fn reset(&mut self) {
        self.messages.clear();
        if let Some(system) = &self.args.system {
            self.messages.push(json!({ "role": "system", "content": system }));
        }
    }

    /// One question, one answer.
    pub(crate) fn answer(&mut self, text: &str) -> Result<()> {
        self.messages.push(json!({ "role": "user", "content": text }));
        let prompt = self.prompt(text);
        let outcome = prompt.and_then(|tokens| self.generate(&tokens));
        match outcome {
            Ok(answer) => {
                self.messages.push(json!({ "role": "assistant", "content": answer }));
                Ok(())
            }
            Err(error) => {
                // The question is taken back, so that the conversation can go on.
                self.messages.pop();
                Err(error)
            }
        }
    }

    /// The whole conversation as tokens.
    fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        if self.args.raw {
            return Ok(self.engine.tokenizer.encode(text, Specials::Parse)?);
        }
        let options = RenderOptions {
            add_generation_prompt: true,
            enable_thinking: Some(self.args.think),
            ..RenderOptions::default()
        };
        let rendered = self.template.render(&Value::Array(self.messages.clone()), &options)?;
        Ok(self.engine.tokenizer.encode(&rendered, Specials::Parse)?)
    }

    fn generate(&mut self, tokens: &[u32]) -> Result<String> {
        interrupt::clear();
        interrupt::pressed();
        let Engine { network, tokenizer, plan, .. } = &mut self.engine;
        let bar = report::prompt_bar(tokens.len());
        let progress = |done: usize, all: usize| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
            if done == all {
                bar.finish_and_clear();
            }
            !interrupt::pressed()
        };
        let prompt =
            Prompt { progress: &progress, ..Prompt::new_checked(tokens, plan.pass_rows as usize)? };
        let limits = Limits {
            max_tokens: self.args.max_tokens as usize,
            end_tokens: tokenizer.end_tokens(),
        };
        let mut stream = TextStream::new(self.args.stop.iter().cloned());
        if self.args.think {
            stream = stream.showing_think();
        }
        let (mut answer, mut output, mut failed) = (String::new(), Vec::new(), None);
        let mut on_token = |token: u32| {
            output.push(token);
            if !tokenizer.is_special(token) || self.args.think {
                match tokenizer.token_bytes(token) {
                    Ok(bytes) => show(&stream.push(bytes), &mut answer),
                    Err(error) => failed = Some(error),
                }
            }
            let stop = stream.stopped() || failed.is_some() || interrupt::pressed();
            if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let outcome = generate(
            network,
            &mut self.sequence,
            &prompt,
            &mut self.sampler,
            &limits,
            &mut on_token,
        );
        bar.finish_and_clear();
        show(&stream.finish(), &mut answer);
        if !output.is_empty() || outcome.is_ok() {
            report::data("\n");
        }
        if let Some(error) = failed {
            return Err(error.into());
        }
        self.report(&outcome?, &output);
        Ok(answer)
    }

    fn report(&mut self, generated: &Generated, output: &[u32]) {
        let receipt = Receipt::new(&self.engine, &generated.prefill, &generated.decode, output)
            .with_speculation(&self.engine, generated.speculation);
        match generated.finish {
            Finish::Context => {
                report::note(
                    "note: the context is full; /reset forgets the conversation, `--context` reserves more",
                );
            }
            Finish::Length => report::note("note: the answer was cut at --max-tokens"),
            Finish::EndOfText | Finish::Stopped => {}
        }
        if !self.args.quiet {
            report::note(&report::summary(&receipt));
        }
        self.last = Some(receipt);
    }

    /// Questions from the terminal until the user leaves.
    pub(crate) fn talk(&mut self) -> Result<()> {
        let mut editor = DefaultEditor::new().context("opening the terminal")?;
        report::note("Ask something; /help tells more.");
        loop {
            // The disk has nothing else to do while somebody types.
            self.engine.network.preload(&self.hottest);
            let line = match editor.readline("> ") {
                Ok(line) => line,
                Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(()),
                Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    report::note("that line is not UTF-8; type it again");
                    continue;
                }
                Err(error) => return Err(error).context("reading from the terminal"),
            };
            // A line that cannot be remembered is no reason to stop.
            let _ = editor.add_history_entry(&line);
            match line.trim() {
                "" => {}
                "/help" => report::note(HELP),
                "/exit" | "/quit" => return Ok(()),
                "/reset" => self.reset(),
                "/stats" => match &self.last {
                    Some(receipt) => report::note(&format!("{:#}", serde_json::to_value(receipt)?)),
                    None => report::note("nothing has been answered yet"),
                },
                command if command.starts_with('/') => {
                    report::note(&format!("unknown command {command}; /help lists them"));
                }
                text => {
                    if let Err(error) = self.answer(text) {
                        report::error(&error);
                        if let Some(GenerateError::Prompt(PromptError::TooLong { .. })) =
                            error.downcast_ref()
                        {
                            report::note(
                                "hint: the prompt is the whole conversation; /reset forgets it",
                            );
                        }
                        let fatal = error
                            .downcast_ref::<GenerateError>()
                            .is_some_and(|e| matches!(e, GenerateError::Forward(_)));
                        if fatal && !std::io::stdin().is_terminal() {
                            return Err(error);
                        }
                    }
                }
            }
        }
    }

    /// Remembers which experts were used.
    pub(crate) fn keep_hot_set(&self) {
        if let Some(Err(error)) = self.hot.as_ref().map(|hot| hot.add(&self.engine)) {
            report::note(&format!("note: {error:#}"));
        }
    }

    /// Writes the record of the last answer, under its name only when it is complete.
    pub(crate) fn write_receipt(&self, path: &Path, mut file: OutputFile) -> Result<()> {
        let Some(receipt) = &self.last else { return Ok(()) };
        let text = format!("{:#}\n", serde_json::to_value(receipt)?);
        file.write_all(text.as_bytes())
            .and_then(|()| file.finish())
            .with_context(|| format!("writing {}", path.display()))
    }
}

fn show(text: &str, answer: &mut String) {
    if !text.is_empty() {
        answer.push_str(text);
        report::data(text);
    }
}
