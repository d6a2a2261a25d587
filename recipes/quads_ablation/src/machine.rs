//! What the arms run on.
use std::collections::BTreeMap;

use crate::results::{Host, Results};

/// This machine, where a run uses a device.
pub fn host(device: String) -> Host {
    Host {
        processor: processor(),
        processors: Some(processors()),
        device,
    }
}

/// Name of the processor, where the system tells: Linux.
pub fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// Processors that this process may use.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// How many arms ran on which machine: `34 arms: X, 32 processors, cpu; 21 arms: Y, 2 processors, cpu`. Where no arm tells, what
/// is known of all of them together.
pub fn told(results: &Results) -> String {
    let mut counts: BTreeMap<Option<&Host>, usize> = BTreeMap::new();
    for arm in results.series.iter().flat_map(|s| &s.seeds).flat_map(|s| &s.arms) {
        *counts.entry(arm.host.as_ref()).or_default() += 1;
    }
    if counts.keys().all(Option::is_none) {
        let machine = &results.machine;
        let all = described(machine.processor.as_deref(), Some(machine.processors), &machine.device);
        return format!("not recorded by arm; all together: {all}");
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let each = counts.into_iter().map(|(host, count)| {
        let arms = if count == 1 { "arm" } else { "arms" };
        match host {
            Some(host) => {
                let host = described(host.processor.as_deref(), host.processors, &host.device);
                format!("{count} {arms}: {host}")
            }
            None => format!("{count} {arms}: not recorded"),
        }
    });
    each.collect::<Vec<_>>().join("; ")
}

fn described(processor: Option<&str>, processors: Option<usize>, device: &str) -> String {
    let processor = processor.unwrap_or("unnamed processor");
    match processors {
        Some(1) => format!("{processor}, 1 processor, {device}"),
        Some(number) => format!("{processor}, {number} processors, {device}"),
        None => format!("{processor}, {device}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn arms_are_counted_by_their_machines_where_these_are_known() {
        let mut results = synthetic::results();
        results.series.truncate(1);
        assert_eq!(
            told(&results),
            "not recorded by arm; all together: a synthetic processor, 2 processors, cpu"
        );
        let host = |name: &str, processors| Host {
            processor: Some(name.into()),
            processors,
            device: "cpu".into(),
        };
        let arms: Vec<_> = results.series[0]
            .seeds
            .iter_mut()
            .flat_map(|seed| &mut seed.arms)
            .collect();
        assert_eq!(arms.len(), 55);
        for (at, arm) in arms.into_iter().enumerate() {
            arm.host = match at {
                0 => None,
                1..=20 => Some(host("one", None)),
                _ => Some(host("other", Some(32))),
            };
        }
        assert_eq!(
            told(&results),
            "34 arms: other, 32 processors, cpu; 20 arms: one, cpu; 1 arm: not recorded"
        );
    }
}
