//! Generates the agent's API from `spec/proto`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../spec/proto");
    let file = format!("{root}/kybernate/agent/v1/agent.proto");
    println!("cargo::rerun-if-changed={file}");
    tonic_prost_build::configure().compile_protos(&[file.as_str()], &[root])?;
    Ok(())
}
