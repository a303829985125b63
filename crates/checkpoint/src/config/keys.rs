//! Keys of the architecture, as numbers in their range or as an error that names key, value and range.

use crate::Checkpoint;
use crate::config::Family;
use crate::error::CheckpointError;
use crate::metadata::{MetaArray, MetaValue};

/// Keys `FAMILY.…` of a checkpoint.
pub(super) struct Keys<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) family: Family,
}

impl Keys<'_> {
    pub(super) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.family)
    }

    pub(super) fn get(&self, key: &str) -> Option<&MetaValue> {
        self.checkpoint.metadata.get(&self.name(key))
    }

    pub(super) fn error(&self, key: &str, found: String, needed: String) -> CheckpointError {
        CheckpointError::Config {
            file: self.checkpoint.metadata_file().to_owned(),
            key: self.checkpoint.metadata.spelling(&self.name(key)).to_owned(),
            found,
            needed,
        }
    }

    pub(super) fn required(&self, key: &str, min: u64, max: u64) -> Result<u64, CheckpointError> {
        let needed = || format!("a number from {min} to {max}");
        self.optional(key, min, max)?.ok_or_else(|| self.error(key, "nothing".to_owned(), needed()))
    }

    /// A number in `min..=max`. An array with an entry for each block counts if its entries agree, those of blocks
    /// that have no such thing (0) aside.
    pub(super) fn optional(
        &self,
        key: &str,
        min: u64,
        max: u64,
    ) -> Result<Option<u64>, CheckpointError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match value {
            MetaValue::Array(MetaArray::U64s(values)) => one_value(values.iter().copied()),
            MetaValue::Array(MetaArray::I64s(values)) => {
                one_value(values.iter().filter_map(|value| u64::try_from(*value).ok()))
            }
            _ => self.checkpoint.metadata.u64(&self.name(key)),
        };
        if let Some(number) = number.filter(|number| (min..=max).contains(number)) {
            return Ok(Some(number));
        }
        let found = match (value, number) {
            (_, Some(number)) => number.to_string(),
            (MetaValue::I64(negative), None) => negative.to_string(),
            (MetaValue::Array(_), None) => "an array of other or of unequal values".to_owned(),
            (other, None) => other.kind().to_owned(),
        };
        Err(self.error(key, found, format!("a number from {min} to {max}")))
    }

    /// A boolean.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(MetaValue::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.error(key, other.kind().to_owned(), "a boolean".to_owned())),
        }
    }

    /// A finite number in `min..=max`.
    pub(super) fn float(&self, key: &str, min: f64, max: f64) -> Result<f64, CheckpointError> {
        self.optional_float(key, min, max)?.ok_or_else(|| {
            let needed = format!("a number from {min} to {max}");
            self.error(key, "nothing".to_owned(), needed)
        })
    }

    pub(super) fn optional_float(
        &self,
        key: &str,
        min: f64,
        max: f64,
    ) -> Result<Option<f64>, CheckpointError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = self.checkpoint.metadata.f64(&self.name(key));
        if let Some(number) = number.filter(|number| (min..=max).contains(number)) {
            return Ok(Some(number));
        }
        let found = number.map_or_else(|| value.kind().to_owned(), |number| number.to_string());
        Err(self.error(key, found, format!("a number from {min} to {max}")))
    }
}

/// The value that all entries other than 0 share.
fn one_value(values: impl Iterator<Item = u64>) -> Option<u64> {
    let mut found = None;
    for value in values.filter(|value| *value != 0) {
        if found.is_some_and(|found| found != value) {
            return None;
        }
        found = Some(value);
    }
    found
}
