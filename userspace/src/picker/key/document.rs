//! Which members of a request make its prompt, and in which order an engine renders them.

use prefixlb_common::gate::mix;
use xxhash_rust::xxh3::xxh3_64;

use super::blocks::Blocks;
use super::json::{Step, Stop, Walk};
use super::{NoKey, PrefixKey, Shape};
use crate::config::KeySettings;

/// Longest model name that can choose a pool. Bytes.
const MODEL_BYTES: usize = 256;
/// Ends a message within the blocks: a byte that no UTF-8 text has.
const MESSAGE_END: u8 = 0xff;
/// Marks a hashed value (an image, a tool call) within the blocks.
const VALUE: u8 = 0xfe;

/// The parser; one a worker, reused, of fixed size.
#[derive(Debug)]
pub struct KeyParser {
    block_bytes: u64,
    window: usize,
    parts: Parts,
}

/// What the walk gathers.
#[derive(Debug)]
struct Parts {
    system: Blocks,
    prompt: Blocks,
    /// For values that enter as one hash.
    value: Blocks,
    tools: u64,
    tools_bytes: u64,
    salt: u64,
    model: [u8; MODEL_BYTES],
    model_bytes: usize,
    model_hash: u64,
}

impl KeyParser {
    /// A parser for these settings.
    #[must_use]
    pub fn new(settings: &KeySettings) -> Self {
        let block = settings.block_bytes.max(1);
        let expected = settings.window_bytes / block + 2;
        Self {
            block_bytes: block as u64,
            window: settings.window_bytes,
            parts: Parts {
                system: Blocks::new(block, expected),
                prompt: Blocks::new(block, expected),
                value: Blocks::new(block, expected),
                tools: 0,
                tools_bytes: 0,
                salt: 0,
                model: [0; MODEL_BYTES],
                model_bytes: 0,
                model_hash: 0,
            },
        }
    }

    /// Reads the key of `body` into `key`, reusing its memory. No more than the window is looked at;
    /// `whole` says whether `body` is the whole body, so that what is missing is a fault.
    pub fn parse(
        &mut self,
        shape: Shape,
        body: &[u8],
        whole: bool,
        key: &mut PrefixKey,
    ) -> Result<(), NoKey> {
        key.clear();
        self.parts.clear();
        let cut = !whole || body.len() > self.window;
        let parts = &mut self.parts;
        let walked = Walk::new(&body[..body.len().min(self.window)]).and_then(|mut walk| {
            walk.object(0, |walk, name, depth| {
                parts.member(walk, shape, name, depth)
            })?;
            match walk.at_end() {
                true => Ok(()),
                false => Err(Stop::Bad(NoKey::Malformed)),
            }
        });
        let complete = match walked {
            Ok(()) => true,
            Err(Stop::Cut) if cut => false,
            Err(Stop::Cut) => return Err(NoKey::Malformed),
            Err(Stop::Bad(why)) => return Err(why),
        };
        self.chain(complete, key)
    }

    /// Chains what was gathered, in the engine's order.
    fn chain(&self, complete: bool, key: &mut PrefixKey) -> Result<(), NoKey> {
        let parts = &self.parts;
        let chain = &mut key.chain;
        let mut last = mix(parts.model_hash, parts.salt);
        if parts.tools_bytes > 0 {
            // As many links as blocks of their size, so that a match counts for what it saves.
            for i in 0..parts.tools_bytes.div_ceil(self.block_bytes) {
                last = mix(last, parts.tools.wrapping_add(i));
                chain.push(last);
            }
        }
        last = parts.system.chain_onto(last, complete, chain);
        parts.prompt.chain_onto(last, complete, chain);
        if chain.is_empty() && !complete {
            // The window is smaller than a block: what there is must do.
            last = parts.system.chain_onto(last, true, chain);
            parts.prompt.chain_onto(last, true, chain);
        }
        if chain.is_empty() {
            return Err(NoKey::NoPrompt);
        }
        Ok(())
    }

    /// The model's name, if it was in the last body parsed.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        let name = &self.parts.model[..self.parts.model_bytes];
        std::str::from_utf8(name)
            .ok()
            .filter(|name| !name.is_empty())
    }

    /// Forgets the last body.
    pub fn clear(&mut self) {
        self.parts.clear();
    }
}

impl Parts {
    fn clear(&mut self) {
        self.system.clear();
        self.prompt.clear();
        self.tools = 0;
        self.tools_bytes = 0;
        self.salt = 0;
        self.model_bytes = 0;
        self.model_hash = 0;
    }

    /// One member of the request. What is not named here (sampling and the like) does not enter the key.
    fn member(&mut self, walk: &mut Walk<'_>, shape: Shape, name: &[u8], depth: u32) -> Step<()> {
        match (name, shape) {
            (b"model", _) => self.model(walk, depth),
            (b"cache_salt", _) => {
                self.salt = self.value(walk, depth)?;
                Ok(())
            }
            (b"tools", _) => self.tools(walk, depth),
            (b"messages", Shape::Chat | Shape::Messages) | (b"input", Shape::Responses) => {
                self.messages(walk, depth)
            }
            (b"system", Shape::Messages) | (b"instructions", Shape::Responses) => {
                let Self { system, value, .. } = self;
                content(walk, depth, system, value)
            }
            (b"prompt", Shape::Completions) | (b"input", Shape::Embeddings) => {
                self.prompt(walk, depth)
            }
            _ => walk.skip(depth),
        }
    }

    fn model(&mut self, walk: &mut Walk<'_>, depth: u32) -> Step<()> {
        if walk.peek()? != b'"' {
            return walk.skip(depth);
        }
        let mut length = 0;
        let name = &mut self.model;
        walk.string(|piece| {
            if let Some(place) = name.get_mut(length..length + piece.len()) {
                place.copy_from_slice(piece);
            }
            length += piece.len();
        })?;
        let kept = length.min(MODEL_BYTES);
        self.model_hash = mix(xxh3_64(&name[..kept]), length as u64);
        // A name that was cut would name another model.
        self.model_bytes = if length <= MODEL_BYTES { length } else { 0 };
        Ok(())
    }

    fn tools(&mut self, walk: &mut Walk<'_>, depth: u32) -> Step<()> {
        let before = walk.position();
        if walk.peek()? != b'[' {
            return walk.skip(depth);
        }
        let tools = self.value(walk, depth)?;
        let length = walk.position() - before;
        if length > 2 {
            self.tools = tools;
            self.tools_bytes = length as u64;
        }
        Ok(())
    }

    fn value(&mut self, walk: &mut Walk<'_>, depth: u32) -> Step<u64> {
        hash_value(walk, depth, &mut self.value)
    }

    /// A list of messages, or one message as text.
    fn messages(&mut self, walk: &mut Walk<'_>, depth: u32) -> Step<()> {
        let Self { prompt, value, .. } = self;
        match walk.peek()? {
            b'"' => {
                walk.string(|piece| prompt.push(piece))?;
                // What a message with this role, written out, would have.
                value.clear();
                value.push(b"user");
                end_message(prompt, value.digest(), 0);
                Ok(())
            }
            b'[' => walk.array(depth, |walk, depth| message(walk, depth, prompt, value)),
            _ => walk.skip(depth),
        }
    }

    /// Text, token ids, or a list of either: of a list, the first is the key, since one place serves all.
    fn prompt(&mut self, walk: &mut Walk<'_>, depth: u32) -> Step<()> {
        let prompt = &mut self.prompt;
        match walk.peek()? {
            b'"' => walk.string(|piece| prompt.push(piece)),
            b'[' => {
                let mut first = true;
                walk.array(depth, |walk, depth| {
                    let byte = walk.peek()?;
                    let is_first = std::mem::replace(&mut first, false);
                    match byte {
                        b'"' if is_first => walk.string(|piece| prompt.push(piece)),
                        b'[' if is_first => walk.array(depth, |walk, _| token(walk, prompt)),
                        b'-' | b'0'..=b'9' => token(walk, prompt),
                        _ => walk.skip(depth),
                    }
                })
            }
            _ => walk.skip(depth),
        }
    }
}

/// A token id: four bytes, so that [12, 3] is not [1, 23] and an id weighs what a token does.
fn token(walk: &mut Walk<'_>, prompt: &mut Blocks) -> Step<()> {
    if !matches!(walk.peek()?, b'-' | b'0'..=b'9') {
        return walk.skip(0);
    }
    let digits = walk.scalar()?;
    let id = digits.iter().fold(0u32, |id, digit| {
        id.wrapping_mul(10).wrapping_add(u32::from(*digit))
    });
    prompt.push(&id.to_le_bytes());
    Ok(())
}

/// One message: its content as it comes, then its role and what else it has. The role stands last because it
/// may come last; a message is what it is only when it has ended anyway.
fn message(walk: &mut Walk<'_>, depth: u32, prompt: &mut Blocks, value: &mut Blocks) -> Step<()> {
    if walk.peek()? != b'{' {
        return walk.skip(depth);
    }
    let mut role = 0;
    let mut others = 0u64;
    walk.object(depth, |walk, name, depth| {
        match name {
            b"content" => content(walk, depth, prompt, value)?,
            b"role" => role = hash_value(walk, depth, value)?,
            // An item's type in /v1/responses; "message" or nothing are the same.
            b"type" | b"id" | b"status" => walk.skip(depth)?,
            _ => {
                let member = hash_value(walk, depth, value)?;
                others = others.wrapping_add(mix(xxh3_64(name), member));
            }
        }
        Ok(())
    })?;
    end_message(prompt, role, others);
    Ok(())
}

fn end_message(prompt: &mut Blocks, role: u64, others: u64) {
    let mut end = [MESSAGE_END; 17];
    end[1..9].copy_from_slice(&role.to_le_bytes());
    end[9..].copy_from_slice(&others.to_le_bytes());
    prompt.push(&end);
}

/// Text, or a list of parts: text parts enter as text, all else (images, audio) as a hash.
fn content(walk: &mut Walk<'_>, depth: u32, text: &mut Blocks, value: &mut Blocks) -> Step<()> {
    match walk.peek()? {
        b'"' => walk.string(|piece| text.push(piece)),
        b'[' => walk.array(depth, |walk, depth| match walk.peek()? {
            b'{' => part(walk, depth, text, value),
            b'"' => walk.string(|piece| text.push(piece)),
            _ => walk.skip(depth),
        }),
        _ => walk.skip(depth),
    }
}

fn part(walk: &mut Walk<'_>, depth: u32, text: &mut Blocks, value: &mut Blocks) -> Step<()> {
    let mut others = 0u64;
    walk.object(depth, |walk, name, depth| {
        match (name, walk.peek()?) {
            (b"text", b'"') => walk.string(|piece| text.push(piece))?,
            (b"type" | b"cache_control", _) => walk.skip(depth)?,
            _ => {
                let member = hash_value(walk, depth, value)?;
                others = others.wrapping_add(mix(xxh3_64(name), member));
            }
        }
        Ok(())
    })?;
    if others != 0 {
        text.push(&[VALUE]);
        text.push(&others.to_le_bytes());
    }
    Ok(())
}

/// Any value as one hash, whatever the order of members and the way it is written.
fn hash_value(walk: &mut Walk<'_>, depth: u32, scratch: &mut Blocks) -> Step<u64> {
    match walk.peek()? {
        b'"' => {
            scratch.clear();
            walk.string(|piece| scratch.push(piece))?;
            Ok(scratch.digest())
        }
        b'{' => {
            let mut sum = 1u64;
            walk.object(depth, |walk, name, depth| {
                // Names are hashed before the value uses the scratch.
                let name = xxh3_64(name);
                let member = hash_value(walk, depth, scratch)?;
                sum = sum.wrapping_add(mix(name, member));
                Ok(())
            })?;
            Ok(mix(sum, 2))
        }
        b'[' => {
            let mut list = 3u64;
            walk.array(depth, |walk, depth| {
                list = mix(list, hash_value(walk, depth, scratch)?);
                Ok(())
            })?;
            Ok(mix(list, 4))
        }
        _ => Ok(mix(xxh3_64(walk.scalar()?), 5)),
    }
}
