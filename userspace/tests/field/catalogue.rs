//! The list of cases and the tests that stand for them do not drift apart.

use std::path::Path;

#[test]
fn every_case_names_tests_that_exist() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let list = std::fs::read_to_string(tests.join("fixtures/field-cases.md")).expect("the list");
    let mut cases = 0;
    for row in list
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| id"))
    {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [id, _, _, named] = cells[..] else {
            continue; // the rule below the headings
        };
        if id.starts_with('-') {
            continue;
        }
        cases += 1;
        let named: Vec<&str> = named
            .split(", ")
            .map(|name| name.trim_matches('`'))
            .collect();
        assert!(!named.concat().is_empty(), "{id} has no test");
        for name in named {
            let (place, function) = match name.split_once("::") {
                Some((module, function)) => (format!("field/{module}.rs"), function),
                None => name
                    .split_once(": ")
                    .map(|(module, function)| (module.to_string(), function))
                    .unwrap_or_else(|| panic!("{id}: {name} is no test's name")),
            };
            assert!(
                holds(&tests.join(&place), &format!("fn {function}(")),
                "{id}: no {function} in {place}"
            );
        }
    }
    assert_eq!(cases, 44);
}

/// Whether a file, or one of a folder's, has this text.
fn holds(path: &Path, text: &str) -> bool {
    if path.is_dir() {
        let entries = std::fs::read_dir(path).expect("a folder of tests");
        return entries.flatten().any(|entry| holds(&entry.path(), text));
    }
    std::fs::read_to_string(path).is_ok_and(|source| source.contains(text))
}
