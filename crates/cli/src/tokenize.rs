//! `sakia tokenize`: text to ids and back.

use std::process::ExitCode;

use anyhow::Result;
use session::Specials;

use crate::args::TokenizeArgs;
use crate::{open, report, run};

/// More text than this is no use to anybody at once.
const MAX_STDIN_BYTES: usize = 16 << 20;

pub(crate) fn run(args: &TokenizeArgs) -> Result<ExitCode> {
    let opened = open::open(&open::choose(&args.model)?)?;
    let tokenizer = &opened.tokenizer;
    if let Some(ids) = &args.decode {
        let text = tokenizer.decode(&ids.0)?;
        let json = serde_json::json!({ "ids": ids.0, "text": text });
        report::data(&if args.json { format!("{json}\n") } else { format!("{text}\n") });
        return Ok(ExitCode::SUCCESS);
    }
    let text = run::text_or_stdin(args.text.as_deref().unwrap_or_default(), MAX_STDIN_BYTES)?;
    let specials = if args.no_special { Specials::AsText } else { Specials::Parse };
    let ids = tokenizer.encode(&text, specials)?;
    if args.json {
        report::data(&format!("{}\n", serde_json::json!({ "text": text, "ids": ids })));
    } else {
        let words: Vec<String> = ids.iter().map(u32::to_string).collect();
        report::data(&format!("{}\n", words.join(" ")));
    }
    Ok(ExitCode::SUCCESS)
}
