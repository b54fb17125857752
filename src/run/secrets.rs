//! Lists the paths of the host that are hidden from a command by default.
//!
//! docs/CLI.md lists the same paths, and a test compares the two. A path that does not exist is
//! skipped, so the tables may name paths that few hosts have.

use std::path::{Path, PathBuf};

/// Below every home: keys, tokens, sessions, and histories that may contain them.
pub const IN_A_HOME: &[&str] = &[
    // Keys and password stores.
    ".ssh",
    ".gnupg",
    ".password-store",
    ".pki",
    ".local/share/keyrings",
    ".local/share/kwalletd",
    ".config/op",
    ".config/1Password",
    ".config/Bitwarden",
    ".config/sops",
    ".config/age",
    ".vault-token",
    // Clouds and clusters.
    ".aws",
    ".azure",
    ".config/gcloud",
    ".boto",
    ".s3cfg",
    ".oci",
    ".config/doctl",
    ".config/hcloud",
    ".config/rclone",
    ".databrickscfg",
    ".databricks",
    ".kaggle",
    ".config/kaggle",
    ".snowflake",
    ".snowsql",
    ".config/ngrok",
    ".ngrok2",
    ".cloudflared",
    ".fly",
    ".kube",
    ".minikube",
    ".terraform.d",
    ".terraformrc",
    ".pulumi",
    ".docker",
    ".config/containers",
    // Forges and registries.
    ".netrc",
    ".git-credentials",
    ".config/git/credentials",
    ".config/gh",
    ".config/hub",
    ".config/glab-cli",
    ".config/tea",
    ".npmrc",
    ".yarnrc.yml",
    ".pypirc",
    ".pip/pip.conf",
    ".config/pip/pip.conf",
    ".config/pypoetry/auth.toml",
    ".cargo/credentials",
    ".cargo/credentials.toml",
    ".gem/credentials",
    ".m2/settings.xml",
    ".gradle/gradle.properties",
    ".composer/auth.json",
    ".config/composer/auth.json",
    // Databases.
    ".pgpass",
    ".my.cnf",
    ".mylogin.cnf",
    // Agents and models.
    ".claude",
    ".claude.json",
    ".config/claude",
    ".codex",
    ".gemini",
    ".cursor",
    ".config/cursor",
    ".aider.conf.yml",
    ".config/github-copilot",
    ".local/share/opencode",
    ".config/goose",
    ".huggingface",
    ".cache/huggingface/token",
    ".config/openai",
    // Browsers and mail.
    ".mozilla",
    ".config/google-chrome",
    ".config/chromium",
    ".config/BraveSoftware",
    ".config/microsoft-edge",
    ".thunderbird",
    ".config/vivaldi",
    ".config/opera",
    "snap",
    ".var/app",
    ".msmtprc",
    ".config/msmtp",
    ".mutt",
    ".config/neomutt",
    ".authinfo",
    ".authinfo.gpg",
    // Editors: tokens of extensions, open files, swap files.
    ".config/Code",
    ".config/Code - OSS",
    ".config/VSCodium",
    ".config/Cursor",
    ".config/Windsurf",
    ".config/zed",
    ".config/JetBrains",
    ".vscode-server",
    ".cursor-server",
    ".viminfo",
    ".vim/swap",
    ".vim/undo",
    ".local/state/nvim",
    ".local/share/nvim/swap",
    ".emacs.d/auto-save-list",
    ".local/share/jupyter/runtime",
    // Wallets.
    ".bitcoin",
    ".ethereum",
    ".electrum",
    ".monero",
    ".config/solana",
    ".config/Exodus",
    ".config/Ledger Live",
    // Histories.
    ".bash_history",
    ".zsh_history",
    ".local/share/fish/fish_history",
    ".python_history",
    ".node_repl_history",
    ".psql_history",
    ".mysql_history",
    ".sqlite_history",
    ".lesshst",
    ".wget-hsts",
];

/// On the whole host: files that only root can read, and the data of services.
pub const ON_THE_HOST: &[&str] = &[
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/security/opasswd",
    "/etc/ssh/ssh_host_rsa_key",
    "/etc/ssh/ssh_host_ecdsa_key",
    "/etc/ssh/ssh_host_ed25519_key",
    "/etc/ssl/private",
    "/etc/pki/tls/private",
    "/etc/letsencrypt",
    "/etc/krb5.keytab",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/etc/kubernetes",
    "/etc/rancher",
    "/etc/wireguard",
    "/etc/NetworkManager/system-connections",
    "/etc/docker/key.json",
    "/var/lib/kubelet",
    "/var/lib/docker",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/cloud",
    "/var/lib/sss",
    "/var/spool/cron",
    "/var/backups",
    "/boot",
    "/lost+found",
];

/// Default directories of stores: below a home, and for root without one.
const STORES_IN_A_HOME: &str = ".local/state/jailfs";
const STORES_OF_ROOT: &str = "/var/lib/jailfs";

/// All hidden paths for these homes.
pub fn hidden(homes: &[PathBuf]) -> Vec<PathBuf> {
    let in_homes = homes.iter().flat_map(|home| IN_A_HOME.iter().map(|path| home.join(path)));
    in_homes.chain(ON_THE_HOST.iter().map(PathBuf::from)).collect()
}

/// The default directories of stores for these homes and for root.
pub fn stores(homes: &[PathBuf]) -> Vec<PathBuf> {
    let in_homes = homes.iter().map(|home| home.join(STORES_IN_A_HOME));
    in_homes.chain([PathBuf::from(STORES_OF_ROOT)]).collect()
}

/// The homes on this host: the caller's own, /root, and those in /home. `own` is what HOME and the
/// user database say. A home that the caller cannot enter is listed too, which is harmless.
pub fn homes(own: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut homes: Vec<PathBuf> = own.into_iter().filter(|home| home.is_absolute()).collect();
    homes.push("/root".into());
    let listed = std::fs::read_dir("/home").into_iter().flatten().flatten();
    homes.extend(listed.map(|entry| entry.path()));
    homes.retain(|home| home != Path::new("/"));
    homes.sort();
    homes.dedup();
    homes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_equal_the_documentation() {
        let text = include_str!("../../docs/CLI.md");
        for path in IN_A_HOME {
            assert!(text.contains(&format!("`~/{path}`")), "docs/CLI.md does not list ~/{path}");
        }
        for path in ON_THE_HOST {
            assert!(text.contains(&format!("`{path}`")), "docs/CLI.md does not list {path}");
        }
    }

    #[test]
    fn every_home_has_its_secrets_and_stores() {
        let homes =
            homes([PathBuf::from("/srv/me"), PathBuf::from("relative"), PathBuf::from("/")]);
        assert!(homes.contains(&"/srv/me".into()) && homes.contains(&"/root".into()));
        assert!(homes.iter().all(|home| home.is_absolute() && home.parent().is_some()));
        let hidden = hidden(&homes);
        assert!(hidden.contains(&"/srv/me/.ssh".into()) && hidden.contains(&"/root/.aws".into()));
        assert!(hidden.contains(&"/etc/shadow".into()));
        let stores = stores(&homes);
        assert!(stores.contains(&"/srv/me/.local/state/jailfs".into()));
        assert!(stores.contains(&"/var/lib/jailfs".into()));
    }
}
