//! [`Settings`]: flags and environment as they stand in a file.

/// What a flag is set to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A switch that is on.
    On,
    /// A switch that YAML says is off, as it is where it is absent.
    Off,
    /// One word or several.
    Words(Vec<String>),
}

impl Value {
    /// One word.
    pub fn word(word: &(impl ToString + ?Sized)) -> Self {
        Self::Words(vec![word.to_string()])
    }

    /// As a person reads it.
    pub fn shown(&self) -> String {
        match self {
            Self::On => "on".to_owned(),
            Self::Off => "off".to_owned(),
            Self::Words(words) => words.join(" "),
        }
    }
}

/// A flag and what it is set to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The flag without its dashes, words joined by underscores.
    pub name: String,
    /// What it is set to.
    pub value: Value,
}

impl Setting {
    /// The flag as it stands on a command line.
    pub fn flag(&self) -> String {
        flag(&self.name)
    }
}

/// A name as it stands on a command line: `--num-layers`.
pub fn flag(name: &str) -> String {
    format!("--{}", name.replace('_', "-"))
}

/// A name of a command line or of YAML, as the table has it.
pub(super) fn name(flag: &str) -> String {
    flag.trim_start_matches('-').replace('-', "_")
}

/// Flags and the environment that belongs to them, in the order of their file. Each name is there once: of a flag
/// that is given twice the last counts, as for Megatron-LM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Variables of the environment.
    pub env: Vec<(String, String)>,
    /// Flags.
    pub flags: Vec<Setting>,
    /// Words beside flags that the file does not hold: the arguments of its script, and variables that it does not assign.
    pub elsewhere: Vec<String>,
    /// Which of several things that the file says counts.
    pub notes: Vec<String>,
}

impl Settings {
    /// What a flag is set to, where it is.
    pub fn get(&self, name: &str) -> Option<&Value> {
        let mut all = self.flags.iter();
        all.find(|setting| setting.name == name)
            .map(|setting| &setting.value)
    }

    /// Whether a switch is on.
    pub fn is_on(&self, name: &str) -> bool {
        self.get(name) == Some(&Value::On)
    }

    /// A variable of the environment.
    pub fn variable(&self, name: &str) -> Option<&str> {
        let mut all = self.env.iter();
        all.find(|(own, _)| own == name)
            .map(|(_, value)| value.as_str())
    }

    /// Sets a flag, at its place where it has one.
    pub(super) fn set(&mut self, name: &str, value: Value) {
        match self.flags.iter_mut().find(|setting| setting.name == name) {
            Some(setting) => setting.value = value,
            None => self.flags.push(Setting {
                name: name.to_owned(),
                value,
            }),
        }
    }

    /// Sets a flag as a file does, which may have set it before.
    pub(super) fn say(&mut self, name: &str, value: Value) {
        if let Some(before) = self.get(name).filter(|before| **before != value) {
            let note = format!(
                "{} is given twice: of `{}` and `{}` the last counts",
                flag(name),
                before.shown(),
                value.shown()
            );
            self.notes.push(note);
        }
        self.set(name, value);
    }

    /// Sets a variable of the environment, at its place where it has one.
    pub(super) fn export(&mut self, name: &str, value: &str) {
        match self.env.iter_mut().find(|(own, _)| own == name) {
            Some((_, own)) => value.clone_into(own),
            None => self.env.push((name.to_owned(), value.to_owned())),
        }
    }
}

/// Why a file holds no settings.
#[derive(Debug, thiserror::Error)]
pub enum SettingsFileError {
    /// It cannot be read; the source says why.
    #[error("{path}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line that is neither form.
    #[error("{path}:{line}: found `{found}`, expected {expected}")]
    Line {
        /// The file.
        path: String,
        /// The line, from 1.
        line: usize,
        /// What was found.
        found: String,
        /// What would work.
        expected: &'static str,
    },
    /// No flag at all.
    #[error(
        "{path}: no flag of Megatron-LM is in it; expected a command line or a shell script with flags such as \
         --num-layers, or YAML with keys such as num_layers under ARGS"
    )]
    Empty {
        /// The file.
        path: String,
    },
}
