//! What guesses of the next layer's experts bring on a disk of some latency, which is put on top of this one's.
//!
//! `cargo run --release -p session --example lookahead -- MODEL SLOTS DELAY_US IDS` (token ids in a text file). The
//! settings take turns, five times; the first 64 ids are the prompt, the others are forced.
#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use expert_store::{FaultKind, FaultPlan};
use memory_plan::Budget;
use model::Lookahead;
use session::{Engine, EngineOptions, Forced, OpenModel, Receipt, Sequence, receipt};
use units::Bytes;

/// Turns of every setting.
const TURNS: usize = 5;
const PROMPT: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, slots, delay_us, ids] = args.as_slice() else {
        return Err("needed: MODEL SLOTS DELAY_US IDS".into());
    };
    let (slots, delay) = (slots.parse()?, Duration::from_micros(delay_us.parse()?));
    let text = std::fs::read_to_string(ids)?;
    let ids: Vec<u32> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let kinds = [Lookahead::Off, Lookahead::Tap, Lookahead::LastToken];
    let mut runs = kinds.map(|_| Vec::new());
    for _ in 0..TURNS {
        for (kind, runs) in kinds.iter().zip(&mut runs) {
            runs.push(run(Path::new(model), slots, delay, *kind, &ids)?);
        }
    }
    for (kind, mut runs) in kinds.iter().zip(runs) {
        runs.sort_by(|a, b| a.decode.tokens_per_second.total_cmp(&b.decode.tokens_per_second));
        let [least, median, most] = [0, TURNS / 2, TURNS - 1].map(|at| &runs[at]);
        let rates = [median, least, most].map(|run| run.decode.tokens_per_second);
        println!(
            "{kind:?}: {:.2} tok/s ({:.2} to {:.2}), {:.3} MB a token, {:.0} % waiting, {:.1} % hits",
            rates[0],
            rates[1],
            rates[2],
            median.decode.read_bytes_per_token / 1e6,
            100.0 * median.decode.wait_share(),
            100.0 * median.decode.hit_rate,
        );
        if let Some(lookahead) = &median.lookahead {
            println!("  {}", serde_json::to_string(lookahead)?);
        }
    }
    Ok(())
}

fn run(
    model: &Path,
    slots: u32,
    delay: Duration,
    lookahead: Lookahead,
    ids: &[u32],
) -> Result<Receipt, Box<dyn Error>> {
    let mut options = EngineOptions::new(Budget::detect(Some(Bytes::gib(2)))?);
    (options.slots, options.lookahead) = (Some(slots), lookahead);
    options.context = Some(u32::try_from(ids.len())?);
    options.faults = (!delay.is_zero()).then(|| FaultPlan::every(FaultKind::Delay(delay)));
    let mut engine = Engine::load(OpenModel::open(model)?, options, &mut |_| {})?;
    let mut sequence = Sequence::open(&mut engine.network)?;
    let (prompt, forced) = ids.split_at(PROMPT.min(ids.len()));
    let run = Forced { prompt, forced, pass_rows: engine.plan.pass_rows as usize };
    let outcome = run.run(&mut engine.network, &mut sequence)?;
    Ok(receipt::of_forced(&engine, &outcome))
}
