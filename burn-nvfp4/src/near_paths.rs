//! Which layers somebody may have meant who named one that does not exist.

/// Layers whose path resembles `path`: those below it, above it, or a few typing errors away.
pub(crate) fn near(path: &str, linears: &[&str]) -> Vec<String> {
    let related = |a: &str, b: &str| a.strip_prefix(b).is_some_and(|rest| rest.starts_with('.'));
    let same_end = |a: &str| a.rsplit('.').next() == path.rsplit('.').next();
    let mut near: Vec<(usize, &str)> = linears
        .iter()
        .filter_map(|linear| {
            let distance = strsim::levenshtein(path, linear);
            let close = distance <= (path.chars().count() / 3).max(2);
            let is_near = close || related(linear, path) || related(path, linear) || same_end(linear);
            is_near.then_some((distance, *linear))
        })
        .collect();
    near.sort();
    near.into_iter().take(5).map(|(_, linear)| linear.to_string()).collect()
}
