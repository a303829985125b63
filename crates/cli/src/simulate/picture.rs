//! Pictures of a simulation.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use session::Trace;

use super::{Run, Who};

const SIZE: (u32, u32) = (960, 600);
const FONT: (&str, u32) = ("sans-serif", 16);

/// Lets `draw` draw; the SVG.
fn svg(
    size: (u32, u32),
    draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Result<()>,
) -> Result<String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        draw(&area)?;
        area.present().map_err(failed)?;
    }
    Ok(text)
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("the picture cannot be drawn: {error}")
}

/// Megabytes read for a generated token over slots, or for a token of a prompt if none was generated.
pub(super) fn curves(trace: &Trace, runs: &[Run]) -> Result<String> {
    let [_, decoded] = trace.tokens();
    let megabytes = |run: &Run| {
        let tally = if decoded > 0 { run.replay.decode } else { run.replay.prefill };
        tally.bytes_per_token() / 1e6
    };
    let most_slots = runs.iter().map(|run| run.slots).max().unwrap_or(1);
    let most = runs.iter().map(megabytes).fold(0.0, f64::max).max(1e-3);
    let mut policies: Vec<Who> = Vec::new();
    for run in runs {
        if !policies.contains(&run.who) {
            policies.push(run.who);
        }
    }
    svg(SIZE, |area| {
        let mut chart = ChartBuilder::on(area)
            .caption("Read from the disk for a token", FONT)
            .margin(16)
            .x_label_area_size(48)
            .y_label_area_size(72)
            .build_cartesian_2d(0..most_slots, 0.0..most * 1.05)
            .map_err(failed)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("slots").y_desc("MB a token").label_style(FONT).draw().map_err(failed)?;
        for (at, who) in policies.iter().enumerate() {
            let color =
                if *who == Who::Belady { BLACK.to_rgba() } else { Palette99::pick(at).to_rgba() };
            let of = runs.iter().filter(|run| run.who == *who);
            let points = of.map(|run| (run.slots, megabytes(run)));
            let line = LineSeries::new(points, color.stroke_width(2)).point_size(3);
            chart.draw_series(line).map_err(failed)?.label(who.name()).legend(move |(x, y)| {
                PathElement::new([(x, y), (x + 24, y)], color.stroke_width(2))
            });
        }
        let mut labels = chart.configure_series_labels();
        let labels = labels.background_style(WHITE).border_style(BLACK).label_font(FONT);
        labels.draw().map_err(failed)?;
        Ok(())
    })
}

/// How often each expert was chosen: a row for each layer, experts from the most to the least chosen.
pub(super) fn heat_map(trace: &Trace) -> Result<String> {
    let [layers, experts, _] = trace.shape();
    let [prompt, decoded] = trace.tokens();
    let tokens = (prompt + decoded).max(1) as f64;
    let uses = trace.uses();
    let cell = (1024 / experts).clamp(2, 12);
    let size = (experts * cell + 120, layers * cell.max(8) + 120);
    svg(size, |area| {
        let caption = format!("Share of {} tokens that chose an expert", prompt + decoded);
        let mut chart = ChartBuilder::on(area)
            .caption(caption, FONT)
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d(0..experts, 0..layers)
            .map_err(failed)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_mesh().label_style(FONT);
        mesh.x_desc("experts of a layer, most chosen first").y_desc("layer");
        mesh.draw().map_err(failed)?;
        for layer in 0..layers {
            let row = &uses[(layer * experts) as usize..((layer + 1) * experts) as usize];
            let mut row = row.to_vec();
            row.sort_unstable_by(|a, b| b.cmp(a));
            let cells = (0..experts).zip(row).map(|(at, uses)| {
                // Chosen by every token is the darkest; a root shows small shares too.
                let share = (f64::from(uses) / tokens).sqrt();
                let color = ViridisRGB.get_color(share);
                Rectangle::new([(at, layer), (at + 1, layer + 1)], color.filled())
            });
            chart.draw_series(cells).map_err(failed)?;
        }
        Ok(())
    })
}
