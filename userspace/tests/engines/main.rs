//! prefixlb in front of engines that nobody here wrote: two llama.cpp servers with a tiny random model, and the
//! official OpenAI client. What they need is installed by `cargo xtask test`.

#[path = "../harness/mod.rs"]
#[expect(
    dead_code,
    unused_imports,
    reason = "the harness serves several test programs, each uses a part"
)]
mod harness;

mod client;
mod llama;
mod serving;
