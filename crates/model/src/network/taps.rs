//! Passes that record what taps see, see [`Tapped`](crate::Tapped).

use std::ops::{ControlFlow, Range};

use compute::backend::Row;

use super::{ForwardError, GoOn, How, LogitRows, Network};
use crate::lookahead::record::TapSink;

impl Network {
    /// Runs one pass over `rows`, without logits, and hands over what the taps of `layers` saw and what these layers'
    /// routers made of the same rows. Nothing is tapped for the first layer.
    ///
    /// # Errors
    /// See [`ForwardError`]; afterwards the sequences of the pass must be reset.
    ///
    /// # Panics
    /// If the network was loaded without a place to record, see [`super::NetworkOptions::record_taps`].
    pub fn forward_tapped(
        &mut self,
        rows: &[Row],
        layers: Range<u32>,
        sink: TapSink<'_>,
    ) -> Result<(), ForwardError> {
        assert!(self.recorder.is_some(), "taps are recorded");
        self.check(rows)?;
        let layers = layers.start.max(1)..layers.end;
        let go_on: GoOn<'_> = &mut |_| ControlFlow::Continue(());
        let how = How { verifying: false, go_on, taps: Some((layers, sink)) };
        self.run(rows, LogitRows::None, how, &mut |_, _| {})
    }
}
