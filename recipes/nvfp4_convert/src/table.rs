//! Tables for the terminal.

/// Which way a column is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Rows under a header, two spaces between columns.
pub fn table(header: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let names = header.iter().map(|(name, _)| name.to_string()).collect();
    let rows: Vec<&Vec<String>> = std::iter::once(&names).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row
            .iter()
            .zip(&widths)
            .zip(header)
            .map(|((cell, width), (_, align))| match align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// A size as people read it.
pub fn bytes(count: u64) -> String {
    match count {
        0..10_000 => format!("{count} B"),
        10_000..10_000_000 => format!("{:.1} KB", count as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} MB", count as f64 / 1e6),
        _ => format!("{:.2} GB", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["a".to_string(), "1".into()], vec!["bcd".into(), "100".into()]];
        let text = table(&[("layer", Align::Left), ("bytes", Align::Right)], &rows);
        assert_eq!(text, "layer  bytes\na          1\nbcd      100\n");
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(
            [9_999, 12_345, 2_000_000_000].map(bytes),
            ["9999 B", "12.3 KB", "2000.0 MB"]
        );
    }
}
