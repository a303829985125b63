//! Rotary embedding: flat keys of older files, `rope_scaling`, or `rope_parameters`.

use super::Reader;
use crate::error::CheckpointError;
use crate::json::Json;
use crate::metadata::MetaValue;

/// Part of a head that the hybrid families rotate when their configuration does not say.
const HYBRID_PART: f64 = 0.25;

/// The objects that may hold rotary keys.
const HOLDERS: [&str; 2] = ["rope_parameters", "rope_scaling"];

pub(super) fn read(reader: &mut Reader<'_>) -> Result<(), CheckpointError> {
    for holder in HOLDERS {
        check_holder(reader, holder)?;
    }
    let theta = find(reader, "rope_theta", true)?;
    let (spelling, value) = spelled(theta, "rope_theta");
    set(reader, "rope.freq_base", &spelling, value)?;
    rotary_part(reader)?;
    let kind = match (find(reader, "rope_type", false)?, find(reader, "type", false)?) {
        (Some(kind), None) | (None, Some(kind)) => Some(kind),
        (Some(kind), Some((spelling, again))) if kind.1 != again => {
            return Err(reader.error(&spelling, again.shown(), format!("as `{}` says", kind.0)));
        }
        (kind, _) => kind,
    };
    let Some((spelling, kind)) = kind else { return Ok(()) };
    match kind.text() {
        // Several positions for a token are one for text.
        Some("default" | "mrope") => Ok(()),
        Some("yarn") => {
            set(reader, "rope.scaling.type", &spelling, Some(kind))?;
            yarn(reader)
        }
        // The check for all containers refuses it, under this name.
        _ => set(reader, "rope.scaling.type", &spelling, Some(kind)),
    }
}

/// An object of values, if it is there; some files keep an object for each kind of layer in it.
fn check_holder(reader: &Reader<'_>, holder: &str) -> Result<(), CheckpointError> {
    let Some(value) = reader.get(holder) else { return Ok(()) };
    let Some(pairs) = value.object() else {
        return Err(reader.error(holder, value.shown(), "an object or null"));
    };
    match pairs.iter().find(|(_, value)| value.object().is_some()) {
        None => Ok(()),
        Some((key, _)) => {
            let key = format!("{holder}.{}", crate::error::printable(key));
            Err(reader.unsupported(&key, "an object".to_owned(), "the same for all layers"))
        }
    }
}

/// A rotary key with how it is written; `flat` if older files have it outside of any object.
fn find<'a>(
    reader: &Reader<'a>,
    key: &str,
    flat: bool,
) -> Result<Option<(String, &'a Json)>, CheckpointError> {
    let inside = HOLDERS
        .into_iter()
        .filter_map(|holder| Some((format!("{holder}.{key}"), reader.get(holder)?.get(key)?)));
    let outside = flat.then(|| Some((key.to_owned(), reader.get(key)?))).flatten();
    let present: Vec<_> = inside.chain(outside).collect();
    let agreed = reader.agreed(present.iter().map(|(name, value)| (name.as_str(), *value)))?;
    Ok(agreed.map(|(name, value)| (name.to_owned(), value)))
}

fn spelled<'a>(found: Option<(String, &'a Json)>, usual: &str) -> (String, Option<&'a Json>) {
    found.map_or_else(|| (usual.to_owned(), None), |(name, value)| (name, Some(value)))
}

fn set(
    reader: &mut Reader<'_>,
    key: &str,
    spelling: &str,
    value: Option<&Json>,
) -> Result<(), CheckpointError> {
    reader.spell(key, spelling);
    if let Some(value) = value {
        let value = reader.scalar(spelling, value)?;
        reader.set_own(key, value);
    }
    Ok(())
}

/// Values of a head that rotate, which files give as a part of it.
fn rotary_part(reader: &mut Reader<'_>) -> Result<(), CheckpointError> {
    let usual = "partial_rotary_factor";
    let (spelling, value) = spelled(find(reader, usual, true)?, usual);
    reader.spell("rope.dimension_count", &spelling);
    let number = |key: &str| reader.get(key).and_then(Json::u64);
    let head_dim = number("head_dim").or_else(|| {
        let (hidden, heads) = (number("hidden_size")?, number("num_attention_heads")?);
        hidden.checked_div(heads)
    });
    // Without a width of heads the file is refused for that.
    let Some(head_dim) = head_dim else { return Ok(()) };
    let default = if reader.family.is_hybrid() { HYBRID_PART } else { 1.0 };
    let part = value.map_or(Some(default), Json::f64);
    let dims = part.filter(|part| (0.0..=1.0).contains(part)).map(|part| part * head_dim as f64);
    let Some(dims) = dims.filter(|dims| dims.fract() == 0.0) else {
        let found = value.map_or_else(|| default.to_string(), Json::shown);
        let needed = format!("a part of the {head_dim} values of a head, from 0 to 1");
        return Err(reader.error(&spelling, found, needed));
    };
    reader.set_own("rope.dimension_count", MetaValue::U64(dims as u64));
    Ok(())
}

fn yarn(reader: &mut Reader<'_>) -> Result<(), CheckpointError> {
    for (key, usual) in [
        ("rope.scaling.factor", "factor"),
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ] {
        let (spelling, value) = spelled(find(reader, usual, false)?, usual);
        set(reader, key, &spelling, value)?;
    }
    for (key, harmless) in
        [("mscale", Json::U64(0)), ("mscale_all_dim", Json::U64(0)), ("truncate", Json::Bool(true))]
    {
        let Some((spelling, value)) = find(reader, key, false)? else { continue };
        if *value != harmless && value.f64() != Some(0.0) {
            return Err(reader.unsupported(&spelling, value.shown(), &harmless.shown()));
        }
    }
    // Here it takes the place of the usual factor; the shared key is on top of it.
    if let Some((spelling, value)) = find(reader, "attention_factor", false)? {
        let factor = find(reader, "factor", false)?.and_then(|(_, factor)| factor.f64());
        let usual = factor.filter(|factor| *factor >= 1.0).map(|f| 0.1 * libm::log(f) + 1.0);
        reader.spell("rope.scaling.yarn_attn_factor", &spelling);
        let multiplier = match (value.f64(), usual) {
            (Some(factor), Some(usual)) => MetaValue::F64(factor / usual),
            _ => reader.scalar(&spelling, value)?,
        };
        reader.set_own("rope.scaling.yarn_attn_factor", multiplier);
    }
    Ok(())
}
