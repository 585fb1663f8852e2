//! Text tables.

/// Rows below a header, with each column as wide as its widest cell.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
    let lines = || std::iter::once(&head).chain(rows);
    let widths: Vec<usize> = (0..head.len())
        .map(|i| {
            lines()
                .filter_map(|l| l.get(i))
                .map(|c| c.chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for line in lines() {
        let cells: Vec<String> = line
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("   ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [
            vec!["llama-70b".to_owned(), "True".to_owned()],
            vec!["x".to_owned(), String::new()],
        ];
        assert_eq!(
            table(&["NAME", "READY"], &rows),
            "NAME        READY\nllama-70b   True\nx\n"
        );
    }
}
