//! Opens the internal modules to the tests and benchmarks of this repository.

/// The items of the internal module `artifact`.
#[cfg(feature = "registry")]
pub mod artifact {
    pub use crate::artifact::*;
}
/// The items of the internal module `base`.
pub mod base {
    pub use crate::base::*;
}
/// The items of the internal module `cli`.
pub mod cli {
    pub use crate::cli::*;
}
/// The items of the internal module `control`.
pub mod control {
    pub use crate::control::*;
}
/// The items of the internal module `daemon`.
pub mod daemon {
    pub use crate::daemon::*;
}
/// The items of the internal module `fs`.
pub mod fs {
    pub use crate::fs::*;
}
/// The items of the internal module `fuse`.
pub mod fuse {
    pub use crate::fuse::*;
}
/// The items of the internal module `jail`.
pub mod jail {
    pub use crate::jail::*;
}
/// The items of the internal module `oci`.
pub mod oci {
    pub use crate::oci::*;
}
/// The items of the internal module `registry`.
#[cfg(feature = "registry")]
pub mod registry {
    pub use crate::registry::*;
}
/// The items of the internal module `run`.
pub mod run {
    pub use crate::run::*;
}
/// The items of the internal module `store`.
pub mod store {
    pub use crate::store::*;
}
/// The items of the internal module `sys`.
pub mod sys {
    pub use crate::sys::*;
}
/// The items of the internal module `tar`.
pub mod tar {
    pub use crate::tar::*;
}
/// The items of the internal module `timeline`.
pub mod timeline {
    pub use crate::timeline::*;
}
/// The items of the internal module `tree`.
pub mod tree {
    pub use crate::tree::*;
}
