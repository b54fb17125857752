# cargo: a crate with a build script, a procedural macro and dependencies that are vendored in the
# tree. Their versions are those of the lock file $LOCK, so a machine that built the tests has them.
export CARGO_NET_OFFLINE=true CARGO_TERM_COLOR=never

build() { # prints how many units were fresh, and how many were built
    cargo build --message-format=json > said 2> errors || { cat errors; return 1; }
    echo "fresh $(grep -c '"fresh":true' said || true)" \
        "built $(grep -c '"fresh":false' said || true)"
}

work() {
    mkdir -p crate/src crate/.cargo
    cd crate
    cp "$LOCK" Cargo.lock
    cat > Cargo.toml <<-END
	[package]
	name = "inner"
	version = "0.1.0"
	edition = "2021"
	[workspace]
	[dependencies]
	serde = { version = "1", features = ["derive"] }
	serde_json = "1"
	END
    cat > build.rs <<-END
	fn main() {
	    println!("cargo:rerun-if-changed=build.rs");
	    let out = std::path::Path::new(&std::env::var("OUT_DIR").unwrap()).join("made.rs");
	    std::fs::write(out, "pub const MADE: u32 = 42;").unwrap();
	}
	END
    cat > src/main.rs <<-END
	include!(concat!(env!("OUT_DIR"), "/made.rs"));
	mod other;
	#[derive(serde::Serialize)]
	struct Said { made: u32, other: u32 }
	fn main() {
	    let said = Said { made: MADE, other: other::other() };
	    println!("{}", serde_json::to_string(&said).unwrap());
	}
	END
    echo 'pub fn other() -> u32 { 7 }' > src/other.rs
    cargo vendor -q --offline > .cargo/config.toml
    build > built
    grep -qx 'fresh 0 built [1-9][0-9]*' built
    units=$(sed 's/.* //' built)
    # Only changed crates are built again.
    test "$(build)" = "fresh $units built 0"
    echo 'pub fn other() -> u32 { 8 }' > src/other.rs
    test "$(build)" = "fresh $((units - 1)) built 1"
    echo "fresh $units built 0" > nothing
}

holds() {
    cd crate
    build | diff nothing -
    test "$(target/debug/inner)" = '{"made":42,"other":8}'
}

more() {
    cd crate
    sed -i 's/42/43/' build.rs
    sed -i 's/8/9/' src/other.rs
    build
    test "$(target/debug/inner)" = '{"made":43,"other":9}'
    cargo clean -q -p serde_json
    rm -rf vendor/serde target/debug/deps
}
