//! `sakia selftest`: every kernel of this machine against its scalar definition, bit for bit.

use std::process::ExitCode;

use anyhow::Result;

use crate::args::SelftestArgs;
use crate::report;

#[allow(clippy::unnecessary_wraps, reason = "verbs share a signature")]
pub(crate) fn run(args: &SelftestArgs) -> Result<ExitCode> {
    let reports = compute::selftest::selftest();
    let failed = reports.iter().filter(|report| !report.equal).count();
    if args.json {
        let rows: Vec<_> = reports
            .iter()
            .map(|r| serde_json::json!({ "backend": r.backend, "kernel": r.kernel, "equal": r.equal, "detail": r.detail }))
            .collect();
        let value = serde_json::json!({ "kernels": rows, "failed": failed });
        report::data(&format!("{value:#}\n"));
    } else {
        for r in &reports {
            let verdict = if r.equal { "equal" } else { "DIFFERS" };
            report::data(&format!("{:<10} {:<28} {verdict} {}\n", r.backend, r.kernel, r.detail));
        }
        report::data(&format!("{} kernels, {failed} differ\n", reports.len()));
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(2) })
}
