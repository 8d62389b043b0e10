//! Where in the file a mistake is: byte offsets ↔ lines, columns and the names of keys.
//!
//! The typed shape knows the place of a value but not its key, and checks over the whole file know the key
//! but not its place. Both are looked up in the spanned tree, and only once something is wrong.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Line and column of `offset`, both from 1; the column counts characters.
#[must_use]
pub fn line_and_column(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
    (line, before[line_start..].chars().count() + 1)
}

/// The dotted name of the key whose value begins at `offset`: `pool.policy.threshold`.
#[must_use]
pub fn key_at(text: &str, offset: usize) -> Option<String> {
    let tree = DeTable::parse(text).ok()?;
    in_table(tree.get_ref(), offset, "")
}

fn in_table(table: &DeTable<'_>, offset: usize, above: &str) -> Option<String> {
    table.iter().find_map(|(key, value)| {
        let name = if above.is_empty() {
            key.get_ref().to_string()
        } else {
            format!("{above}.{}", key.get_ref())
        };
        in_value(value, offset, &name)
    })
}

fn in_value(value: &Spanned<DeValue<'_>>, offset: usize, name: &str) -> Option<String> {
    let inner = match value.get_ref() {
        DeValue::Table(table) => in_table(table, offset, name),
        DeValue::Array(array) => array.iter().find_map(|item| in_value(item, offset, name)),
        _ => None,
    };
    let here = value.span().start == offset && !matches!(value.get_ref(), DeValue::Table(_));
    inner.or_else(|| here.then(|| name.to_owned()))
}

/// The place of the value under `path`, as far down as the file has it; an item of an array by its number.
#[must_use]
pub fn span_of(text: &str, path: &[Step<'_>]) -> Option<Range<usize>> {
    let tree = DeTable::parse(text).ok()?;
    let (first, rest) = path.split_first()?;
    let Step::Key(key) = first else { return None };
    let mut at = tree.get_ref().get(*key)?;
    for step in rest {
        let next = match (at.get_ref(), step) {
            (DeValue::Table(table), Step::Key(key)) => table.get(*key),
            (DeValue::Array(array), Step::Item(index)) => array.get(*index),
            _ => None,
        };
        match next {
            Some(next) => at = next,
            None => break,
        }
    }
    Some(at.span())
}

/// One step of a path into the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'s> {
    /// A key of a table.
    Key(&'s str),
    /// An item of an array.
    Item(usize),
}

/// The parser's word on a key that nobody knows, made ours: with the nearest known key if one is near.
///
/// Other messages pass through, in one line.
#[must_use]
pub fn reworded(message: &str) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    match quoted.split_first() {
        Some((unknown, known)) if message.starts_with("unknown field") && !known.is_empty() => {
            match nearest(unknown, known) {
                Some(near) => format!("unknown key {unknown:?}: did you mean {near:?}?"),
                None => format!(
                    "unknown key {unknown:?}: known here are {}",
                    known.join(", ")
                ),
            }
        }
        _ => message.trim_end().replace('\n', ", "),
    }
}

/// The known word that `typed` is most likely a misspelling of.
fn nearest<'k>(typed: &str, known: &[&'k str]) -> Option<&'k str> {
    // A file may hold a key of any length; no known key is longer than this.
    if typed.len() > 64 {
        return None;
    }
    let ranked = known.iter().map(|word| (distance(typed, word), *word));
    let (off, word) = ranked.min_by_key(|(off, _)| *off)?;
    (off <= 1 + word.len() / 5).then_some(word)
}

/// Edit distance (Levenshtein), over bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_places_are_found_both_ways() {
        let text = "listen = [\"a\", \"b\"]\n[[pool]]\nname = \"x\"\n[pool.policy]\ntau = 7\n";
        let tau = text.find('7').expect("there");
        assert_eq!(key_at(text, tau).as_deref(), Some("pool.policy.tau"));
        assert_eq!(line_and_column(text, tau), (5, 7));
        let b = span_of(text, &[Step::Key("listen"), Step::Item(1)]).expect("there");
        assert_eq!(&text[b.clone()], "\"b\"");
        assert_eq!(key_at(text, b.start).as_deref(), Some("listen"));
        assert_eq!(span_of(text, &[Step::Key("admin")]), None);
    }

    #[test]
    fn a_misspelt_key_is_recognised_and_a_strange_one_is_not() {
        let said = "unknown field `treshold`, expected one of `kind`, `threshold`";
        assert!(reworded(said).ends_with("did you mean \"threshold\"?"));
        let said = "unknown field `colour`, expected one of `kind`, `threshold`";
        assert!(reworded(said).ends_with("known here are kind, threshold"));
    }
}
