//! Tells the tests whether they are optimised: then they do more in the time of a test.

fn main() {
    let level = std::env::var("OPT_LEVEL").expect("cargo says how it optimises");
    println!("cargo::rustc-check-cfg=cfg(optimised)");
    if level != "0" {
        println!("cargo::rustc-cfg=optimised");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
