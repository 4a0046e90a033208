//! [`read`]: settings of a file of either form, a command line or YAML.

use std::path::Path;

use super::text::{Settings, SettingsFileError};
use super::{shell, yaml};

/// Reads a file of either form.
pub fn read(path: &Path) -> Result<Settings, SettingsFileError> {
    let shown = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|source| SettingsFileError::Io {
        path: shown.clone(),
        source,
    })?;
    parse(&shown, &text)
}

/// Reads a text of either form; `path` names it in messages, and its ending says which form it is. A text without
/// such an ending is YAML where its first line is a key.
pub fn parse(path: &str, text: &str) -> Result<Settings, SettingsFileError> {
    let ending = Path::new(path).extension().and_then(|end| end.to_str());
    let as_yaml = match ending {
        Some("yaml" | "yml") => true,
        Some("sh" | "slurm" | "sbatch" | "bash") => false,
        _ => yaml::begins(text),
    };
    let settings = if as_yaml {
        yaml::parse(path, text)?
    } else {
        shell::parse(path, text)?
    };
    if settings.flags.is_empty() {
        return Err(SettingsFileError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(settings)
}
