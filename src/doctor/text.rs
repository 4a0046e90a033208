//! `moefold doctor` for a person: the host, the GPUs, the libraries, then what is missing.

use moefold_profiles::units::Bytes;
use moefold_reports::tables::Table;

use super::host::LockedMemory;
use super::{Gpu, LibraryRow, NOT_FOUND, Report};

pub(super) fn text(report: &Report, verbose: bool) -> String {
    let mut parts = vec![host(report)];
    if !report.devices.is_empty() {
        parts.push(devices(&report.devices));
    }
    if !report.links.is_empty() {
        parts.push(links(report));
    }
    if verbose || report.libraries.iter().any(|l| l.state != "absent") {
        parts.push(libraries(report, verbose));
    }
    if verbose {
        parts.push(searched(report));
    }
    parts.push(verdict(report, verbose));
    parts.join("\n")
}

fn host(report: &Report) -> String {
    let host = &report.host;
    let mut processor = vec![
        host.processor
            .clone()
            .unwrap_or_else(|| "unknown processor".to_owned()),
        format!("{} cores", host.cores),
    ];
    processor.extend((!host.features.is_empty()).then(|| host.features.join(" ")));
    let mut memory = vec![Bytes(host.memory_bytes).to_string()];
    let available = host.memory_available_bytes;
    memory.extend(available.map(|bytes| format!("{} available", Bytes(bytes))));
    let pages = host.transparent_huge_pages.as_ref();
    memory.extend(pages.map(|pages| format!("huge pages: {pages}")));
    let reserved = host.huge_pages.filter(|pages| *pages > 0);
    memory.extend(reserved.map(|pages| format!("{pages} reserved")));
    memory.extend(host.locked_memory.as_ref().map(|limit| match limit {
        LockedMemory::Unlimited => "no limit on locked memory".to_owned(),
        LockedMemory::UpToBytes(bytes) => format!("up to {} locked", Bytes(*bytes)),
    }));
    let compiler = match &host.compiler {
        Some(compiler) => compiler.as_str(),
        None => "no C++ compiler; only tests of CUDA kernels on the CPU need one",
    };
    let mut lines = vec![
        format!("moefold    {}", report.moefold),
        format!("system     {}", host.system),
        format!("processor  {}", processor.join(", ")),
        format!("memory     {}", memory.join(", ")),
        format!("compiler   {compiler}"),
    ];
    let cuda = report.cuda.iter().map(|cuda| format!("CUDA {cuda}"));
    let driver: Vec<String> = report.driver_release.iter().cloned().chain(cuda).collect();
    if !driver.is_empty() {
        lines.push(format!("driver     {}", driver.join(", ")));
    }
    let kept = match &report.cache {
        Some(path) => format!("kept in {}", path.display()),
        None => "not kept (MOEFOLD_CACHE names no folder)".to_owned(),
    };
    let pack = report.pack.iter();
    let pack: Vec<String> = pack
        .map(|path| format!("pack {}", path.display()))
        .collect();
    lines.push(format!(
        "kernels    {}",
        [vec![kept], pack].concat().join(", ")
    ));
    if report.devices.is_empty() {
        lines.push("GPUs       none".to_owned());
    }
    joined(&lines)
}

/// Lines as a text that ends with one.
fn joined(lines: &[String]) -> String {
    lines.join("\n") + "\n"
}

fn devices(devices: &[Gpu]) -> String {
    let mut table = Table::new([
        ">GPU",
        "name",
        "capability",
        ">memory",
        ">in use",
        ">SMs",
        ">MHz",
        ">memory MHz",
        ">L2",
        "MIG",
        ">NVLinks",
        "PCI",
    ]);
    let number = |number: Option<u32>| number.map_or_else(unsaid, |number| number.to_string());
    let bytes = |bytes: Option<u64>| bytes.map_or_else(unsaid, |bytes| Bytes(bytes).to_string());
    for device in devices {
        table.row([
            device.ordinal.to_string(),
            device.name.clone(),
            device.capability.clone().unwrap_or_else(unsaid),
            bytes(device.memory_bytes),
            bytes(device.memory_used_bytes),
            number(device.multiprocessors),
            number(device.clock_mhz),
            number(device.memory_clock_mhz),
            bytes(device.l2_bytes),
            device
                .mig
                .map_or_else(unsaid, |mig| if mig { "on" } else { "off" }.to_owned()),
            number(device.nvlinks),
            device.pci.clone().unwrap_or_else(unsaid),
        ]);
    }
    table.text()
}

/// What no library said.
fn unsaid() -> String {
    "-".to_owned()
}

/// One line where all pairs are alike, else who reads whose memory how.
fn links(report: &Report) -> String {
    let kind = |kind| match kind {
        "nvlink" => "NVLink",
        "pcie" => "PCIe",
        _ => "-",
    };
    let first = report.links[0].kind;
    if report.links.iter().all(|link| link.kind == first) {
        return match kind(first) {
            "-" => "No GPU reaches another's memory.\n".to_owned(),
            by => format!("Every GPU reaches every other's memory by {by}.\n"),
        };
    }
    let ordinals: Vec<u32> = report.devices.iter().map(|device| device.ordinal).collect();
    let headings = ordinals.iter().map(|to| format!("GPU {to}"));
    let mut table = Table::new(["reaches".to_owned()].into_iter().chain(headings));
    for from in &ordinals {
        let cells = ordinals.iter().map(|to| {
            let found = report.links.iter().find(|l| (l.from, l.to) == (*from, *to));
            found.map_or("", |link| kind(link.kind)).to_owned()
        });
        table.row([format!("GPU {from}")].into_iter().chain(cells));
    }
    table.text()
}

fn libraries(report: &Report, verbose: bool) -> String {
    let mut table = Table::new(["library", "version", "where"]);
    for library in &report.libraries {
        // Nothing needs it, so its absence is no news.
        if library.name == "cuBLAS" && library.state == "absent" && !verbose {
            continue;
        }
        table.row([
            library.name.to_owned(),
            library.version.clone().unwrap_or_else(unsaid),
            place(library),
        ]);
        for passed in library.passed_over.iter().filter(|_| verbose) {
            let found = format!("passed over: {} ({})", passed.path.display(), passed.why);
            table.row([String::new(), String::new(), found]);
        }
    }
    let text = table.text();
    if report.nvrtc_architectures.is_empty() {
        return text;
    }
    let architectures = report.nvrtc_architectures.iter();
    let names: Vec<String> = architectures.map(|number| format!("sm_{number}")).collect();
    format!("{text}\nNVRTC compiles for {}.\n", names.join(" "))
}

fn place(library: &LibraryRow) -> String {
    let path = library.path.as_ref().map(|path| path.display().to_string());
    match (path, &library.why) {
        (Some(path), None) => path,
        (Some(path), Some(_)) => format!("broken: {path}"),
        (None, _) => NOT_FOUND.to_owned(),
    }
}

fn searched(report: &Report) -> String {
    let places = report.searched.iter().map(|place| format!("  {place}"));
    let heading = "Libraries are looked for in".to_owned();
    joined(&[heading].into_iter().chain(places).collect::<Vec<_>>())
}

/// What `--device auto` takes.
fn auto(report: &Report) -> String {
    match report.devices.first() {
        Some(device) if report.auto_device == "cuda" => format!(
            "--device auto trains on GPU {} ({}).",
            device.ordinal, device.name
        ),
        _ => "--device auto trains on the CPU.".to_owned(),
    }
}

/// What can be done here; then each missing thing: what was found and costs, and the remedy.
fn verdict(report: &Report, verbose: bool) -> String {
    let heading = match (report.gpu, report.missing.is_empty()) {
        (true, true) => return format!("Ready: nothing is missing. {}\n", auto(report)),
        (true, false) => "There are GPUs, and something is missing:\n",
        (false, _) => "CPU only: planning, and training on the CPU, work as they are. For GPUs:\n",
    };
    let mut lines = vec![heading.to_owned()];
    let names = report
        .missing
        .iter()
        .map(|missing| missing.what.chars().count());
    let width = names.max().unwrap_or(0);
    for missing in &report.missing {
        let said = if missing.found == NOT_FOUND {
            vec![format!("{NOT_FOUND}: {}", missing.costs)]
        } else {
            vec![missing.found.clone(), missing.costs.to_owned()]
        };
        let mut name = missing.what.as_str();
        for line in said.iter().chain([&missing.remedy]) {
            lines.push(format!("  {name:width$}  {line}"));
            name = "";
        }
    }
    if report.gpu {
        lines.push(format!("\n{}", auto(report)));
    }
    if !verbose {
        lines.push("\n-v lists where libraries are looked for.".to_owned());
    }
    joined(&lines)
}
