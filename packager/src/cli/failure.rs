//! How a command ends when not well. What is a refusal and what is a failure is decided here.

use std::error::Error;
use std::fmt;

use kybernate_packager::artifact::ArtifactError;
use kybernate_packager::copy::CopyError;
use kybernate_packager::difference::DifferenceError;
use kybernate_packager::inspect::InspectError;
use kybernate_packager::interchange::ExportError;
use kybernate_packager::key::{KeyError, KeyErrorKind};
use kybernate_packager::listing::ListError;
use kybernate_packager::pack::PackError;
use kybernate_packager::policy::PolicyError;
use kybernate_packager::sign::SignError;
use kybernate_packager::store::{StoreError, StoreErrorKind};
use kybernate_packager::unpack::UnpackError;
use kybernate_packager::unpack::deep::DeepError;
use kybernate_packager::verify::VerifyError;
use kybernate_packager::walk::WalkError;
use kybernate_spec::{Reason, chain};
use serde::Serialize;
use serde_json::Value;

use super::preflight::Obstacles;

/// Exit code of wrong usage, as sysexits.h has it; clap would say 2, which means refused here.
const USAGE: u8 = 64;

/// Any error.
type AnyError = Box<dyn Error + Send + Sync>;

/// Why a command did not do what was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something went wrong; another try may succeed.
    Failed(AnyError),
    /// A rule forbids it.
    Refused(Rule, AnyError),
    /// The command line cannot be understood.
    Usage(AnyError),
    /// The command line cannot be understood, and people have been told with an example.
    Shown(AnyError),
    /// The answer to a question is not yes, and has been printed. Its exit code says which it is.
    Answered(u8, AnyError),
}

/// The rules that refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Rule {
    /// Nobody who is trusted signed it.
    Signature,
    /// Its bytes are not what they should be.
    Integrity,
    /// It would not run here.
    Compatibility,
    /// It asks for more privileges than it gets.
    Identity,
    /// The node's configuration does not allow it.
    Policy,
    /// Somebody else has it, and it goes on in one place only.
    Claim,
}

impl Failure {
    /// Something went wrong.
    pub(crate) fn failed(error: impl Into<AnyError>) -> Self {
        Self::Failed(error.into())
    }

    /// The command line is wrong.
    pub(crate) fn usage(error: impl Into<AnyError>) -> Self {
        Self::Usage(error.into())
    }

    /// Returns a word for it.
    pub(crate) const fn word(&self) -> &'static str {
        match self {
            Self::Failed(_) => "failed",
            Self::Refused(..) => "refused",
            Self::Usage(_) | Self::Shown(_) => "usage",
            Self::Answered(..) => "answered",
        }
    }

    /// Returns the exit code.
    pub(crate) const fn code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Refused(..) => 2,
            Self::Usage(_) | Self::Shown(_) => USAGE,
            Self::Answered(code, _) => *code,
        }
    }
}

/// A failure as programs read it.
#[derive(Debug, Serialize)]
pub(crate) struct Told {
    error: ToldError,
    exit: u8,
    /// What the failure leaves behind, and what can be done about it.
    #[serde(skip_serializing_if = "str::is_empty")]
    note: String,
}

#[derive(Debug, Serialize)]
struct ToldError {
    /// What [`Failure::code`] says, as a word.
    kind: &'static str,
    /// The rule that refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<Rule>,
    /// What is wrong with the artifact (`spec/artifact.md`, "Reasons").
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Reason>,
    message: String,
    /// What a look at the container found.
    #[serde(skip_serializing_if = "<[Value]>::is_empty")]
    findings: Vec<Value>,
}

impl Failure {
    /// Returns what programs see, as `--json` prints it. `note` is what the failure leaves behind.
    pub(crate) fn told(&self, note: &str) -> Told {
        let (rule, error) = match self {
            Self::Refused(rule, error) => (Some(*rule), error),
            Self::Failed(error)
            | Self::Usage(error)
            | Self::Shown(error)
            | Self::Answered(_, error) => (None, error),
        };
        let kind = self.word();
        let message = chain(&**error).to_string();
        let findings = error.downcast_ref::<Obstacles>().map(Obstacles::facts);
        let findings = findings.unwrap_or_default();
        let error = ToldError { kind, rule, reason: reason(&**error), message, findings };
        Told { error, exit: self.code(), note: note.to_owned() }
    }
}

/// Returns what is wrong with the artifact, when that is what the error is about.
fn reason(error: &(dyn Error + Send + Sync + 'static)) -> Option<Reason> {
    if let Some(error) = error.downcast_ref::<UnpackError>() {
        return error.reason();
    }
    if let Some(error) = error.downcast_ref::<ArtifactError>() {
        return error.reason();
    }
    error.downcast_ref::<StoreError>().and_then(StoreError::reason)
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => write!(f, "error: {}", chain(&**error)),
            Self::Refused(rule, error) => write!(f, "refused ({rule}): {}", chain(&**error)),
            Self::Usage(error) | Self::Shown(error) => write!(f, "usage: {}", chain(&**error)),
            Self::Answered(_, error) => write!(f, "answer: {}", chain(&**error)),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Signature => "signature",
            Self::Integrity => "integrity",
            Self::Compatibility => "compatibility",
            Self::Identity => "identity",
            Self::Policy => "policy",
            Self::Claim => "claim",
        })
    }
}

impl Rule {
    /// Reads the name that an agent gives a rule.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let rules = [
            Self::Signature,
            Self::Integrity,
            Self::Compatibility,
            Self::Identity,
            Self::Policy,
            Self::Claim,
        ];
        rules.into_iter().find(|rule| rule.to_string() == name)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        match error.kind {
            StoreErrorKind::Mismatch(_)
            | StoreErrorKind::TooLarge { .. }
            | StoreErrorKind::Malformed(_) => Self::Refused(Rule::Integrity, error.into()),
            StoreErrorKind::NotFound
            | StoreErrorKind::Disputed(_)
            | StoreErrorKind::Unauthorized(_)
            | StoreErrorKind::Denied(_)
            | StoreErrorKind::Full
            | StoreErrorKind::RequestTooLarge
            | StoreErrorKind::Io(_)
            | StoreErrorKind::Busy { .. }
            | StoreErrorKind::Registry(_) => Self::failed(error),
        }
    }
}

impl From<ArtifactError> for Failure {
    fn from(error: ArtifactError) -> Self {
        match error {
            ArtifactError::Store(error) => error.into(),
            ArtifactError::NotACheckpoint(..) => Self::failed(error),
            ArtifactError::Version(_) => Self::Refused(Rule::Compatibility, error.into()),
            ArtifactError::Shape(..) | ArtifactError::Malformed(..) => {
                Self::Refused(Rule::Integrity, error.into())
            }
        }
    }
}

impl From<InspectError> for Failure {
    fn from(error: InspectError) -> Self {
        match error {
            InspectError::Artifact(error) => error.into(),
            InspectError::Unpack(error) => error.into(),
            error @ InspectError::Io(..) => Self::failed(error),
        }
    }
}

impl From<DifferenceError> for Failure {
    fn from(error: DifferenceError) -> Self {
        match error {
            DifferenceError::Artifact(error) => error.into(),
            DifferenceError::Unpack(error) => error.into(),
            error @ DifferenceError::Memory(_) => Self::Refused(Rule::Integrity, error.into()),
            error @ DifferenceError::Io(..) => Self::failed(error),
        }
    }
}

impl From<ListError> for Failure {
    fn from(error: ListError) -> Self {
        match error {
            ListError::Store(error) => error.into(),
            ListError::Artifact(error) => error.into(),
            ListError::Signatures(error) => error.into(),
            ListError::Policy(error) => error.into(),
            error @ (ListError::Unnamed | ListError::Disagree { .. }) => Self::Usage(error.into()),
        }
    }
}

impl From<UnpackError> for Failure {
    fn from(error: UnpackError) -> Self {
        match error {
            UnpackError::Store(error) => error.into(),
            error if error.is_integrity() => Self::Refused(Rule::Integrity, error.into()),
            error => Self::failed(error),
        }
    }
}

impl From<DeepError> for Failure {
    fn from(error: DeepError) -> Self {
        match error {
            DeepError::Walk(error) => error.into(),
            DeepError::Artifact(error) => error.into(),
            DeepError::Unpack(error) => error.into(),
            error @ (DeepError::PageHash { .. }
            | DeepError::Image { .. }
            | DeepError::Volume(..)) => Self::Refused(Rule::Integrity, error.into()),
            error @ DeepError::Io(..) => Self::failed(error),
        }
    }
}

impl From<VerifyError> for Failure {
    fn from(error: VerifyError) -> Self {
        if error.is_refusal() {
            return Self::Refused(Rule::Signature, error.into());
        }
        Self::failed(error)
    }
}

impl From<PolicyError> for Failure {
    fn from(error: PolicyError) -> Self {
        match error {
            PolicyError::Uncovered(_) | PolicyError::Expired(_) => {
                Self::Refused(Rule::Policy, error.into())
            }
            error @ PolicyError::Signature { .. } if error.is_refusal() => {
                Self::Refused(Rule::Signature, error.into())
            }
            error @ PolicyError::Signature { .. } => Self::failed(error),
        }
    }
}

impl From<WalkError> for Failure {
    fn from(error: WalkError) -> Self {
        match error {
            WalkError::Store(error) => error.into(),
            WalkError::Malformed(..) | WalkError::TooMany | WalkError::TooDeep => {
                Self::Refused(Rule::Integrity, error.into())
            }
        }
    }
}

impl From<CopyError> for Failure {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Store(error) => error.into(),
            CopyError::Walk(error) => error.into(),
            error @ CopyError::Incomplete(_) => Self::failed(error),
        }
    }
}

impl From<PackError> for Failure {
    fn from(error: PackError) -> Self {
        match error {
            PackError::Store(error) => error.into(),
            error @ PackError::InDump { .. } => Self::Usage(error.into()),
            error => Self::failed(error),
        }
    }
}

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Store(error) => error.into(),
            ExportError::Artifact(error) => error.into(),
            ExportError::Unpack(error) => error.into(),
            error @ ExportError::Impossible { .. } => {
                Self::Refused(Rule::Compatibility, error.into())
            }
            error @ (ExportError::Image(_) | ExportError::Io(..)) => Self::failed(error),
        }
    }
}

impl From<SignError> for Failure {
    fn from(error: SignError) -> Self {
        match error {
            SignError::Store(error) => error.into(),
            SignError::Key(error) => error.into(),
            SignError::Json(_) => Self::failed(error),
        }
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Self {
        match error.kind {
            KeyErrorKind::NoPassword => Self::usage(error),
            _ => Self::failed(error),
        }
    }
}
