"""The notebooks keep the rules of the course, read from their files without running them (nbval runs them).

Each rule is a function from a notebook to its faults, in words. Each rule is also tried on a notebook spoilt on purpose, so that
none of them can pass by looking at nothing.

A notebook of the course is numbered. A bonus notebook is a museum: ten exhibits instead of three exercises, and no claim of its own. Which
of the two a notebook is, its title says, and its file name has to say the same.
"""

import ast
import builtins
import copy
import getpass
import importlib
import json
import re
import symtable
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from minserve.lab import claims
from minserve.lab.notebook import lines_of

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BONUS = ROOT / "notebooks" / "bonus_bug_museum.ipynb"
CHECKED = "nbval-check-output"
TASTES = {"00": ("A05", "A27")}  # claims that a notebook settles beside those of its plan, to show how
PARTS = (  # what every notebook has, and a mark by which it is known
    ("a title", r"^# \d\d · \S"),
    ("what you need", r"\*\*You need\*\*"),
    ("what you get", r"\*\*You get\*\*"),
    ("the CPU time", r"\*\*CPU time\*\*"),
    ("a Korean summary", r"한국어"),
    ("the question", r"^## The question"),
    ("the predictions", r"^## .*[Pp]rediction"),
    ("the real one", r"^## The real one"),
    ("exercises", r"^## Exercises"),
    ("a recap", r"^## What to take with you"),
    ("solutions", r"^## Solutions"),
)
BONUS_TITLE = ("a title", r"^# Bonus · \S")
BONUS_PARTS = (
    *(BONUS_TITLE if name == "a title" else (name, mark) for name, mark in PARTS if name != "the real one"),
    ("the laws", r"^### \w+ laws"),
    ("which law catches what", r"^## Which law catches which"),
)
MAY_DEFINE = ("naive_", "Naive", "solution_", "exercise_")
BONUS_MAY_DEFINE = ("Faulty", "Exhibit", "exhibit_", "law_", "Exercise", "exercise_", "Solution", "solution_")
SOURCE = r"[\w.-]+/[\w.-]+#\d+"  # where a bug was reported: repository and number


def read(path: Path) -> NotebookNode:
    return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)


def is_bonus(notebook: NotebookNode) -> bool:
    return bool(notebook.cells) and re.match(BONUS_TITLE[1], notebook.cells[0].source) is not None


def title_fits(stem: str, title: str) -> bool:
    """Whether a notebook with this title may have this file name: `# 03 · ...` is 03_name, `# Bonus · ...` is bonus_name."""
    name, mark = re.fullmatch(r"(\d\d|bonus)_[a-z0-9_]+", stem), re.match(r"# (\d\d|Bonus) · \S", title)
    return name is not None and mark is not None and name[1] == mark[1].lower()


# --- reading a notebook ---------------------------------------------------------------------------


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook: NotebookNode) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def tree(cell: NotebookNode) -> ast.Module:
    return ast.parse(cell.source)


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def definitions(cell: NotebookNode) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    return [node for node in tree(cell).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]


def names_used(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def texts(value: object) -> Iterator[str]:
    """All strings inside an output, pictures left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if not str(key).startswith("image/"):
                yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


def at(cell: NotebookNode) -> str:
    """A cell's address in a fault: its id and its first line."""
    return f"cell {cell.get('id')} ({cell.source.splitlines()[0][:50] if cell.source else 'empty'})"


# --- the file -------------------------------------------------------------------------------------


def is_valid(notebook: NotebookNode) -> list[str]:
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        return [str(error).splitlines()[0]]
    return []


def has_the_plain_kernel(notebook: NotebookNode) -> list[str]:
    """JupyterLab rewrites any other name on opening, and the file counts as changed."""
    kernel = dict(notebook.metadata.get("kernelspec", {}))
    wanted = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return [] if kernel == wanted else [f"kernelspec {kernel}"]


def has_no_widget_state(notebook: NotebookNode) -> list[str]:
    """Case 187: GitHub refuses a notebook whose saved widget state lacks a key."""
    return ["metadata.widgets is present"] if "widgets" in notebook.metadata else []


def has_unique_cell_ids(notebook: NotebookNode) -> list[str]:
    ids = [cell.get("id") for cell in notebook.cells]
    return [f"cell id {cell_id} stands {ids.count(cell_id)} times" for cell_id in sorted(set(ids)) if ids.count(cell_id) > 1]


def is_small(notebook: NotebookNode) -> list[str]:
    num_bytes = len(nbformat.writes(notebook).encode())
    faults = [f"{num_bytes:,} bytes, at most 400 KB"] if num_bytes > 400_000 else []
    for cell in code_cells(notebook):
        for output in cell.outputs:
            num_bytes = 3 * len(output.get("data", {}).get("image/png", "")) // 4
            faults += [f"{at(cell)}: a picture of {num_bytes:,} bytes, at most 60 KB"] if num_bytes > 60_000 else []
    return faults


# --- the shape ------------------------------------------------------------------------------------


def has_all_parts(notebook: NotebookNode) -> list[str]:
    text, parts = prose(notebook), BONUS_PARTS if is_bonus(notebook) else PARTS
    return [f"{name} is missing" for name, mark in parts if not re.search(mark, text, re.MULTILINE)]


def has_one_title_in_the_first_cell(notebook: NotebookNode) -> list[str]:
    text = re.sub(r"```.*?```", "", prose(notebook), flags=re.DOTALL)
    titles = re.findall(r"^# .+", text, re.MULTILINE)
    first = notebook.cells[0].source if notebook.cells else ""
    return [] if len(titles) == 1 and titles[0] in first else [f"titles: {titles}"]


def has_the_right_length(notebook: NotebookNode) -> list[str]:
    num_cells = len(code_cells(notebook))
    num_words = len(re.sub(r"```.*?```", "", prose(notebook), flags=re.DOTALL).split())
    least, most = (45, 65) if is_bonus(notebook) else (25, 45)
    faults = [] if least <= num_cells <= most else [f"{num_cells} code cells, {least} to {most} are meant"]
    least, most = (2500, 4000) if is_bonus(notebook) else (1500, 3500)
    return faults + ([] if least <= num_words <= most else [f"{num_words} words, {least:,} to {most:,} are meant"])


def has_short_cells(notebook: NotebookNode) -> list[str]:
    faults = []
    for cell in code_cells(notebook):
        num_lines, most = len(cell.source.splitlines()), 30 if any(isinstance(d, ast.ClassDef) for d in definitions(cell)) else 20
        faults += [f"{at(cell)}: {num_lines} lines, at most {most}"] if num_lines > most else []
        widest = max(map(len, cell.source.splitlines()), default=0)  # a page shows about 100 characters, the rest hides
        faults += [f"{at(cell)}: a line of {widest} characters, at most 100"] if widest > 100 else []
    return faults


def has_prose_between_code(notebook: NotebookNode) -> list[str]:
    kinds = [cell.cell_type for cell in notebook.cells]
    runs = [i for i in range(len(kinds) - 2) if kinds[i : i + 3] == ["code"] * 3]
    return [f"three code cells in a row from {at(notebook.cells[i])}" for i in runs]


def has_three_exercises(notebook: NotebookNode) -> list[str]:
    """Three solutions, folded away, each of them executed with an assertion. (A museum has exhibits instead.)"""
    if is_bonus(notebook):
        return []
    solutions = [cell for cell in code_cells(notebook) if re.search(r"^(def |class )?solution_\w+", cell.source, re.MULTILINE)]
    stubs = [cell for cell in code_cells(notebook) if re.search(r"^(def )?exercise_\w+", cell.source, re.MULTILINE)]
    faults = [] if len(solutions) == 3 else [f"{len(solutions)} solutions, three are meant"]
    faults += [] if len(stubs) >= 3 else [f"{len(stubs)} exercise cells, at least three are meant"]
    return faults + [fault for cell in solutions for fault in _faults_of_solution(cell)]


def _faults_of_solution(cell: NotebookNode) -> Iterator[str]:
    if not (cell.metadata.get("jupyter", {}).get("source_hidden") and "hide-input" in tags(cell)):
        yield f"{at(cell)}: the solution is in plain sight"
    if not _names_asserted(cell):
        yield f"{at(cell)}: nothing asserts that it is right"


def _names_asserted(cell: NotebookNode) -> set[str]:
    """All names in the assertions that the cell itself makes, not those in its functions."""
    return set[str]().union(*(names_used(node) for node in tree(cell).body if isinstance(node, ast.Assert)))


def has_ten_exhibits(notebook: NotebookNode) -> list[str]:
    """Each with its source, a faulty class whose check fails while that of the package passes, a hint, a stub, and a folded solution.

    One cell tries all ten again, so that none of the checks can fail to fail. Beside the repairs there is one exercise in design.
    """
    if not is_bonus(notebook):
        return []
    exhibits = _exhibits(notebook)
    faults = [] if [*exhibits] == list(range(1, 11)) else [f"exhibits {[*exhibits]}, 1 to 10 are meant"]
    solutions = {d.name: cell for cell in code_cells(notebook) for d in definitions(cell) if d.name.lower().startswith("solution")}
    for number, cells in exhibits.items():
        faults += [f"exhibit {number}: {fault}" for fault in _faults_of_exhibit(cells, solutions)]
    faults += [fault for cell in solutions.values() for fault in _faults_of_solution(cell)]
    faults += [] if any(name.startswith("solution_") for name in solutions) else ["no solution of an exercise in design"]
    names = {d.name for cell in code_cells(notebook) for d in definitions(cell) if d.name.startswith("Faulty")}
    loops = [
        node for cell in code_cells(notebook) if names <= names_used(tree(cell)) for node in tree(cell).body if isinstance(node, ast.For)
    ]
    tried = any(isinstance(node, ast.Assert) for loop in loops for node in ast.walk(loop))
    return faults + ([] if tried else ["no cell tries all faulty classes in a loop that asserts"])


def _exhibits(notebook: NotebookNode) -> dict[int, list[NotebookNode]]:
    """The cells from each `### Exhibit N ·` to the next heading; a number that comes twice has the cells of both."""
    exhibits: dict[int, list[NotebookNode]] = {}
    current: list[NotebookNode] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and re.search(r"^##+ ", cell.source, re.MULTILINE):
            found = re.search(r"^### Exhibit (\d+) · \S", cell.source, re.MULTILINE)
            current = exhibits.setdefault(int(found[1]), []) if found else []
        current.append(cell)
    return exhibits


def _faults_of_exhibit(cells: list[NotebookNode], solutions: dict[str, NotebookNode]) -> Iterator[str]:
    words = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    if not re.search(SOURCE, words):
        yield "no source, repository#number"
    if not re.search(r"<details><summary>Hint</summary>\n\n\S.*</details>", words, re.DOTALL):
        yield "no hint to unfold"
    code = [cell for cell in cells if cell.cell_type == "code"]
    classes = {d.name: d for cell in code for d in definitions(cell) if isinstance(d, ast.ClassDef)}
    faulty = [name for name in classes if name.startswith("Faulty")]
    if len(faulty) != 1:
        yield f"{len(faulty)} faulty classes, one is meant"
        return
    [name], [base, *_] = faulty, [*(ast.unparse(base) for base in classes[faulty[0]].bases), "nothing"]
    if not any(base in _names_asserted(cell) and {name, base} <= names_used(tree(cell)) for cell in code):
        yield f"no cell asserts that {name} fails and {base} passes"
    stub, solution = name.replace("Faulty", "Exercise", 1), name.replace("Faulty", "Solution", 1)
    if stub not in classes or not any(stub in names_used(tree(cell)) for cell in code):
        yield f"no stub {stub} that is tried"
    if solution not in solutions or solution not in _names_asserted(solutions[solution]):
        yield f"no solution {solution} that is asserted"


def ends_by_closing(notebook: NotebookNode) -> list[str]:
    """Case 197: the engine is closed at the end, and a cell asserts that its memory came back."""
    if "LLM" not in {name for cell in code_cells(notebook) for name in names_used(tree(cell))}:
        return []
    last = code_cells(notebook)[-1].source
    return (
        [] if ".close()" in last and "assert " in last and "resident_bytes" in last else ["the last cell does not close and assert memory"]
    )


# --- the code -------------------------------------------------------------------------------------


def imports_only_at_the_top(notebook: NotebookNode) -> list[str]:
    first, *others = code_cells(notebook)
    faults = [] if "setup" in names_used(tree(first)) else ["the first code cell does not call setup()"]
    for cell in others:
        found = [node for node in ast.walk(tree(cell)) if isinstance(node, ast.Import | ast.ImportFrom)]
        faults += [f"{at(cell)}: an import"] if found else []
    return faults


def uses_no_shell(notebook: NotebookNode) -> list[str]:
    """No magics, no shell, no path of this machine; case 200: nothing is installed under a running kernel."""
    faults = []
    for cell in code_cells(notebook):
        for pattern in (r"^\s*[!%]", r"sys\.path", r"\bpyplot\b|\bplt\.", r"[\"'](/|~/|[A-Z]:\\)\w", r"pip install", r"\binput\("):
            if re.search(pattern, cell.source, re.MULTILINE):
                faults.append(f"{at(cell)}: matches {pattern}")
    return faults


def opens_files_as_utf8(notebook: NotebookNode) -> list[str]:
    """Case 191: on Windows the system's code page is not UTF-8."""
    faults = []
    for cell in code_cells(notebook):
        for call in (node for node in ast.walk(tree(cell)) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name in ("open", "read_text", "write_text") and not any(keyword.arg == "encoding" for keyword in call.keywords):
                faults.append(f"{at(cell)}: {name} without encoding")
    return faults


def runs_no_event_loop(notebook: NotebookNode) -> list[str]:
    """Case 196: a notebook already runs in one."""
    return [f"{at(cell)}: asyncio.run" for cell in code_cells(notebook) if "asyncio.run(" in cell.source]


def defines_only_what_it_may(notebook: NotebookNode) -> list[str]:
    """All else is imported, so that no second copy of the package's code can grow here."""
    allowed = BONUS_MAY_DEFINE if is_bonus(notebook) else MAY_DEFINE
    return [f"{at(cell)}: defines {d.name}" for cell in code_cells(notebook) for d in definitions(cell) if not d.name.startswith(allowed)]


def mutates_only_the_package(notebook: NotebookNode) -> list[str]:
    """A faulty class is a class of the package with a few lines changed: one base, methods that the base has, at most 12 lines."""
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for cell in code_cells(notebook)
        for node in ast.walk(tree(cell))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    faults = []
    for cell in code_cells(notebook):
        for definition in (d for d in definitions(cell) if d.name.startswith("Faulty")):
            bases = [imported.get(ast.unparse(base), "") for base in getattr(definition, "bases", [])]
            methods = [node.name for node in definition.body if isinstance(node, ast.FunctionDef)]
            base = bases[0] if len(bases) == 1 and bases[0].startswith("minserve.") and _resolves(bases[0]) else None
            known = base is not None and methods and all(_resolves(f"{base}.{method}") for method in methods)
            faults += [] if known else [f"{at(cell)}: {definition.name} overrides {methods} of {bases}"]
            num_lines = len(ast.unparse(definition).splitlines())
            faults += [f"{at(cell)}: {num_lines} lines are more than a mutation"] if num_lines > 12 else []
    return faults


def compares_every_naive_version(notebook: NotebookNode) -> list[str]:
    """Each naive name is used in a cell that asserts, directly or through another naive version that is."""
    naive: dict[str, set[str]] = {}
    asserted: set[str] = set()
    for cell in code_cells(notebook):
        for node in tree(cell).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.lower().startswith("naive"):
                naive[node.name] = names_used(node)
        statements = [n for n in tree(cell).body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
        used = set().union(*(names_used(node) for node in statements)) if statements else set()
        if "assert_same" in used or any(isinstance(node, ast.Assert) for node in statements):
            asserted |= used
    for _ in naive:
        asserted |= set().union(*(names for name, names in naive.items() if name in asserted)) if naive else set()
    return [f"{name} is compared with nothing" for name in naive if name not in asserted]


def ends_in_no_bare_comparison(notebook: NotebookNode) -> list[str]:
    faults = []
    for cell in code_cells(notebook):
        for node in tree(cell).body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare | ast.BoolOp):
                faults.append(f"{at(cell)}: a comparison that nobody reads; assert it")
    return faults


def gives_functions_their_inputs(notebook: NotebookNode) -> list[str]:
    """A function reads its arguments, imports and other definitions, never a notebook's variable."""
    known = set(dir(builtins)) | {"__name__"}
    for cell in code_cells(notebook):
        known |= {d.name for d in definitions(cell)}
        for node in ast.walk(tree(cell)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                known |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    faults = []
    for cell in code_cells(notebook):
        for definition in definitions(cell):
            table = symtable.symtable(ast.unparse(definition), "cell", "exec")
            unknown = _globals_of(table) - known
            faults += [f"{at(cell)}: {definition.name} reads {', '.join(sorted(unknown))}"] if unknown else []
    return faults


def _globals_of(table: symtable.SymbolTable) -> set[str]:
    found = {s.get_name() for child in table.get_children() for s in child.get_symbols() if s.is_global() and s.is_referenced()}
    return found.union(*(_globals_of(child) for child in table.get_children()))


def seeds_its_random_numbers(notebook: NotebookNode) -> list[str]:
    """Numbers come from a generator that is made, with its seed, in the same cell."""
    unseeded = r"(?<!np\.)\brandom\.(?!Random\b)[a-z]\w*\(|np\.random\.(?!default_rng)|torch\.manual_seed"
    faults = [f"{at(cell)}: a generator without a seed of its own" for cell in code_cells(notebook) if re.search(unseeded, cell.source)]
    made = r"(random\.Random|default_rng|torch\.Generator)\(\)(?!\.manual_seed)"
    return faults + [f"{at(cell)}: a generator without a seed" for cell in code_cells(notebook) if re.search(made, cell.source)]


# --- the outputs ----------------------------------------------------------------------------------


def was_run_from_top_to_bottom(notebook: NotebookNode) -> list[str]:
    counts = [cell.execution_count for cell in code_cells(notebook)]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"execution counts {counts}"]


def has_checked_cells(notebook: NotebookNode) -> list[str]:
    """At least five cells whose output nbval compares; without a count or an output it would silently compare nothing."""
    cells = [cell for cell in code_cells(notebook) if CHECKED in tags(cell)]
    faults = [] if len(cells) >= 5 else [f"{len(cells)} checked cells, at least 5 are meant"]
    return faults + [f"{at(cell)}: checked, but has no output" for cell in cells if not cell.outputs or cell.execution_count is None]


def checks_no_timing(notebook: NotebookNode) -> list[str]:
    timers = {"perf_counter", "run_set", "wall_s", "resident_bytes"}
    return [
        f"{at(cell)}: its output is compared, and depends on a clock"
        for cell in code_cells(notebook)
        if CHECKED in tags(cell) and any(timer in cell.source for timer in timers)
    ]


def has_no_error_output(notebook: NotebookNode) -> list[str]:
    return [
        f"{at(cell)}: {output.output_type} {output.get('ename', output.get('name'))}"
        for cell in code_cells(notebook)
        for output in cell.outputs
        if (output.output_type == "error" and "raises-exception" not in tags(cell)) or output.get("name") == "stderr"
    ]


def has_whole_streams(notebook: NotebookNode) -> list[str]:
    """What a cell prints is stored in one piece: GitHub shows each piece of a streamed answer on a line of its own."""
    faults = []
    for cell in code_cells(notebook):
        names = [output.get("name") for output in cell.outputs]
        split = any(a is not None and a == b for a, b in zip(names, names[1:], strict=False))
        faults += [f"{at(cell)}: its stream is in pieces; run nbconvert --coalesce-streams"] if split else []
    return faults


def shows_no_local_path(notebook: NotebookNode) -> list[str]:
    """Case 199: no folder, user or kernel of the machine that ran it."""
    pattern = r"/home/|/root|/tmp/|/Users/|/work/|[A-Z]:\\\\?\w|site-packages|ipykernel_\d"
    user = getpass.getuser()
    faults = []
    for cell in code_cells(notebook):
        for text in (text for output in cell.outputs for text in texts(output)):
            if re.search(pattern, text) or (len(user) > 3 and user != "root" and user in text):
                faults.append(f"{at(cell)}: {text[:80]!r}")
    return faults


def has_no_time_stamps(notebook: NotebookNode) -> list[str]:
    return [f"{at(cell)}: execution times in its metadata" for cell in code_cells(notebook) if "execution" in cell.metadata]


def gives_widgets_a_still(notebook: NotebookNode) -> list[str]:
    """Case 187: sliders are dead on GitHub and in print; beside each stands a text of ours or a picture."""
    faults = []
    for cell in code_cells(notebook):
        for data in (output.get("data", {}) for output in cell.outputs):
            if any("widget" in kind for kind in data):
                still = "image/png" in data or not re.match(r"\w+\(|^$", str(data.get("text/plain", "")))
                faults += [] if still else [f"{at(cell)}: a widget without a picture or a sentence"]
    return faults


# --- the words ------------------------------------------------------------------------------------


def names_only_what_exists(notebook: NotebookNode) -> list[str]:
    """Every `minserve.x.y` in backticks can be imported, every `minserve/x.py` is a file."""
    names = re.findall(r"`(minserve(?:_kernels)?(?:\.\w+)+)`", prose(notebook))
    paths = re.findall(r"`((?:minserve|notebooks|tests|kernels)/[\w./]+)`", prose(notebook))
    faults = [f"{name} does not exist" for name in names if not _resolves(name)]
    return faults + [f"{path} is no file" for path in paths if not (ROOT / path).exists()]


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def has_no_pictures_in_its_prose(notebook: NotebookNode) -> list[str]:
    found = re.findall(r"!\[[^\]]*\]\([^)]*\)|<img\b[^>]*>", prose(notebook))
    attached = [at(cell) for cell in notebook.cells if cell.get("attachments")]
    return [f"{picture[:60]} in markdown" for picture in found] + [f"{cell}: an attachment" for cell in attached]


def quotes_no_line_numbers(notebook: NotebookNode) -> list[str]:
    return [f"{found!r}: names last, line numbers do not" for found in re.findall(r"\blines? \d+|\.py:\d+", prose(notebook))]


def knows_its_claims(notebook: NotebookNode) -> list[str]:
    """Ids in prose and in verdicts exist; every verdict is one of the four and is argued."""
    ids = set(re.findall(r"\b[AB]\d\d\b", prose(notebook)))
    lines = []
    for cell in code_cells(notebook):
        for text in (text for output in cell.outputs for text in texts(output)):
            lines += [line for line in text.splitlines() if line.startswith("claim | ")]
    faults = []
    for line in lines:
        fields = line.split(" | ", 4)
        good = len(fields) == 5 and fields[2] in list(claims.Verdict) and all(field.strip() for field in fields)
        ids.add(fields[1])
        faults += [] if good else [f"a verdict that says too little: {line}"]
    return faults + [f"claim {claim_id} is unknown" for claim_id in sorted(ids - set(claims.IDS))]


def carries_its_claims_to_a_verdict(notebook: NotebookNode) -> list[str]:
    """Every claim of its plan has one record, with the verdict of the data, and no other claim has any. A museum has no plan of claims."""
    [number] = re.findall(r"^# (\d\d) ·", notebook.cells[0].source, re.MULTILINE)[:1] or ["?"]
    planned = (*claims.claims_of(number), *TASTES.get(number, ()))
    lines = lines_of(notebook, "claim")
    recorded = [claim_id for claim_id, *_ in lines]
    faults = [f"claim {id_}: {recorded.count(id_)} records, one is meant" for id_ in planned if recorded.count(id_) != 1]
    faults += [f"claim {id_} is not of notebook {number}" for id_ in recorded if id_ not in planned]
    expected = {id_: claims.desk_verdict(id_) for id_ in planned}
    return faults + [
        f"claim {id_}: {verdict} recorded, {expected[id_]} expected"
        for id_, verdict, *_ in lines
        if id_ in expected and verdict != expected[id_]
    ]


# --- the tests ------------------------------------------------------------------------------------

Spoil = Callable[[NotebookNode], object]


def _set_source(notebook: NotebookNode, source: str, index: int = -1) -> None:
    code_cells(notebook)[index].source = source


def _set_output(notebook: NotebookNode, data: dict[str, str], cell_tags: tuple[str, ...] = ()) -> None:
    cell = code_cells(notebook)[-1]
    cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
    cell.metadata["tags"] = list(cell_tags)


def _say(notebook: NotebookNode, words: str) -> None:
    notebook.cells.append(nbformat.v4.new_markdown_cell(words))


def _replace(notebook: NotebookNode, old: str, new: str) -> None:
    for cell in notebook.cells:
        cell.source = cell.source.replace(old, new)


def _replace_outputs(notebook: NotebookNode, old: str, new: str) -> None:
    for cell in code_cells(notebook):
        for data in (output.data for output in cell.outputs if "text/plain" in output.get("data", {})):
            data["text/plain"] = data["text/plain"].replace(old, new)


def _stderr(notebook: NotebookNode) -> None:
    code_cells(notebook)[-1].outputs = [nbformat.v4.new_output("stream", name="stderr", text="a warning")]


def _checked_without_output(notebook: NotebookNode) -> None:
    next(cell for cell in code_cells(notebook) if CHECKED in tags(cell)).outputs = []


# Each rule, and ways to break it.
RULES: dict[Callable[[NotebookNode], list[str]], list[Spoil]] = {
    is_valid: [lambda nb: nb.cells[0].update(cell_type="poem")],
    has_the_plain_kernel: [lambda nb: nb.metadata.kernelspec.update(display_name=".venv"), lambda nb: nb.metadata.pop("kernelspec")],
    has_no_widget_state: [lambda nb: nb.metadata.update(widgets={})],
    has_unique_cell_ids: [lambda nb: nb.cells[1].update(id=nb.cells[0].id)],
    is_small: [lambda nb: _set_output(nb, {"image/png": "A" * 90_000}), lambda nb: _say(nb, "long " * 90_000)],
    has_all_parts: [
        lambda nb: _replace(nb, "## Exercises", "## Homework"),
        lambda nb: _replace(nb, "한국어", "Korean"),
        lambda nb: _replace(nb, "**CPU time**", "Time"),
        lambda nb: _replace(nb, "# 00 ·", "# Bonus ·"),
    ],
    has_one_title_in_the_first_cell: [lambda nb: _say(nb, "# Another title"), lambda nb: nb.cells.pop(0)],
    has_the_right_length: [lambda nb: nb.cells.extend(code_cells(nb)), lambda nb: _say(nb, "word " * 3000)],
    has_short_cells: [
        lambda nb: _set_source(nb, "x = 1\n" * 21),
        lambda nb: _set_source(nb, "class Naive:\n" + "    x = 1\n" * 30),
        lambda nb: _set_source(nb, f"x = '{'long' * 30}'"),
    ],
    has_prose_between_code: [lambda nb: nb.cells.extend(code_cells(nb)[:3])],
    has_three_exercises: [
        lambda nb: _replace(nb, "solution_tpot", "answer_tpot"),
        lambda nb: [cell.metadata.pop("jupyter", None) for cell in code_cells(nb)],
        lambda nb: _replace(nb, "assert check(solution", "check(solution"),
    ],
    has_ten_exhibits: [lambda nb: _replace(nb, "# 00 ·", "# Bonus ·")],
    ends_by_closing: [lambda nb: _replace(nb, ".close()", ".flush()"), lambda nb: nb.cells.append(code_cells(nb)[0])],
    imports_only_at_the_top: [lambda nb: _set_source(nb, "import os"), lambda nb: _set_source(nb, "import os", 0)],
    uses_no_shell: [
        lambda nb: _set_source(nb, "!ls"),
        lambda nb: _set_source(nb, "%pip install torch"),
        lambda nb: _set_source(nb, "sys.path.append('..')"),
        lambda nb: _set_source(nb, "open('/data/x')"),
        lambda nb: _set_source(nb, "open('C:\\data')"),
        lambda nb: _set_source(nb, "plt.show()"),
    ],
    opens_files_as_utf8: [lambda nb: _set_source(nb, "open('x')"), lambda nb: _set_source(nb, "path.read_text()")],
    runs_no_event_loop: [lambda nb: _set_source(nb, "asyncio.run(main())")],
    defines_only_what_it_may: [
        lambda nb: _set_source(nb, "class Scheduler:\n    pass"),
        lambda nb: _set_source(nb, "def helper(): ..."),
        lambda nb: _set_source(nb, "class FaultyScheduler(Scheduler): ..."),  # these names are the museum's
        lambda nb: _set_source(nb, "def exhibit_engine(): ..."),
        lambda nb: _set_source(nb, "def law_books(): ..."),
    ],
    mutates_only_the_package: [lambda nb: _set_source(nb, "class FaultyThing:\n    def release(self): ...")],
    compares_every_naive_version: [lambda nb: _set_source(nb, "def naive_new(): ...\n\n\nnaive_new()")],
    ends_in_no_bare_comparison: [lambda nb: _set_source(nb, "x = 1\nx == 1"), lambda nb: _set_source(nb, "1 < 2 and 2 < 3")],
    gives_functions_their_inputs: [
        lambda nb: _set_source(nb, "def naive_f():\n    return llm"),
        lambda nb: _set_source(nb, "class NaiveF:\n    def f(self):\n        return [llm for _ in range(2)]"),
    ],
    seeds_its_random_numbers: [
        lambda nb: _set_source(nb, "random.random()"),
        lambda nb: _set_source(nb, "rng = random.Random()"),
        lambda nb: _set_source(nb, "x = np.random.rand(3)"),
        lambda nb: _set_source(nb, "rng = np.random.default_rng()"),
    ],
    was_run_from_top_to_bottom: [lambda nb: code_cells(nb)[0].update(execution_count=7), lambda nb: nb.cells.append(code_cells(nb)[0])],
    has_checked_cells: [_checked_without_output, lambda nb: [cell.metadata.update(tags=[]) for cell in code_cells(nb)]],
    checks_no_timing: [lambda nb: (_set_source(nb, "time.perf_counter()"), _set_output(nb, {"text/plain": "1"}, (CHECKED,)))],
    has_no_error_output: [
        _stderr,
        lambda nb: code_cells(nb)[-1].update(outputs=[nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]),
    ],
    has_whole_streams: [lambda nb: code_cells(nb)[-1].update(outputs=[nbformat.v4.new_output("stream", text="a")] * 2)],
    shows_no_local_path: [
        lambda nb: _set_output(nb, {"text/plain": "saved to /home/kim/run.json"}),
        lambda nb: _set_output(nb, {"text/plain": "C:\\Users\\kim"}),
        lambda nb: _set_output(nb, {"text/html": "/tmp/ipykernel_17/3.py:1: UserWarning"}),
    ],
    has_no_time_stamps: [lambda nb: code_cells(nb)[0].metadata.update(execution={"iopub.execute_input": "2026-11-29T17:00:00Z"})],
    gives_widgets_a_still: [
        lambda nb: _set_output(nb, {"application/vnd.jupyter.widget-view+json": "{}", "text/plain": "VBox(children=(IntSlider(value=1),))"})
    ],
    names_only_what_exists: [lambda nb: _say(nb, "`minserve.core.engine.Motor`"), lambda nb: _say(nb, "`minserve/core/motor.py`")],
    has_no_pictures_in_its_prose: [lambda nb: _say(nb, "![a map](map.png)"), lambda nb: _say(nb, '<img src="map.png">')],
    quotes_no_line_numbers: [lambda nb: _say(nb, "see line 12"), lambda nb: _say(nb, "engine.py:12")],
    knows_its_claims: [
        lambda nb: _say(nb, "Claim A92 says"),
        lambda nb: _set_output(nb, {"text/plain": "claim | A27 | RIGHT | 3 | because"}),
        lambda nb: _set_output(nb, {"text/plain": "claim | A27 | WRONG | 3 | "}),
        lambda nb: _set_output(nb, {"text/plain": "claim | C01 | WRONG | 3 | because"}),
    ],
    carries_its_claims_to_a_verdict: [
        lambda nb: [cell.update(outputs=[]) for cell in code_cells(nb)],
        lambda nb: _replace(nb, "# 00 ·", "# 06 ·"),
        lambda nb: nb.cells.pop(0),
        lambda nb: _set_output(nb, {"text/plain": "claim | A27 | WRONG | 3.26 | said twice"}),
        lambda nb: _set_output(nb, {"text/plain": "claim | A06 | WRONG | 839 MB | not of this notebook"}),
        lambda nb: _replace_outputs(nb, "claim | A27 | WRONG", "claim | A27 | HOLDS"),
    ],
}
# Those that look at a museum in another way than at a numbered notebook, and ways to break them there.
BONUS_RULES: dict[Callable[[NotebookNode], list[str]], list[Spoil]] = {
    has_all_parts: [
        lambda nb: _replace(nb, "## Exercises", "## Homework"),
        lambda nb: _replace(nb, "한국어", "Korean"),
        lambda nb: _replace(nb, "### Six laws", "### Six rules"),
        lambda nb: _replace(nb, "## Which law catches", "## What catches"),
        lambda nb: _replace(nb, "# Bonus ·", "# 16 ·"),
    ],
    has_the_right_length: [lambda nb: nb.cells.extend(code_cells(nb)), lambda nb: _say(nb, "word " * 3000)],
    has_ten_exhibits: [
        lambda nb: _replace(nb, "### Exhibit 7 ·", "### Exhibit 8 ·"),
        lambda nb: _replace(nb, "### Exhibit 10 ·", "### Number 10 ·"),
        lambda nb: _replace(nb, "vllm-project/vllm#11565", "a report"),
        lambda nb: _replace(nb, "<details>", ""),
        lambda nb: _replace(nb, "class FaultyLeak(BlockManager):", "class FormerLeak(BlockManager):"),
        lambda nb: _replace(nb, "assert broken and not exhibit_faults(BlockManager, leak)", "broken"),
        lambda nb: _replace(nb, "assert broken and not exhibit_faults(BlockManager, leak)", "assert broken"),
        lambda nb: _replace(nb, "passed = exercise_verdict(ExerciseLeak, leak)", ""),
        lambda nb: _replace(nb, "assert exercise_verdict(SolutionLeak", "exercise_verdict(SolutionLeak"),
        lambda nb: _replace(nb, "class SolutionLeak(", "class SolutionOfLeak("),
        lambda nb: [cell.metadata.pop("jupyter", None) for cell in code_cells(nb)],
        lambda nb: _replace(nb, "solution_visit", "exercise_answer"),
        lambda nb: _replace(nb, "assert caught[number]", "passed = caught[number]"),
    ],
    defines_only_what_it_may: [
        lambda nb: _set_source(nb, "class Scheduler:\n    pass"),
        lambda nb: _set_source(nb, "def helper(): ..."),
        lambda nb: _set_source(nb, "def naive_cache(): ..."),
    ],
    mutates_only_the_package: [
        lambda nb: _replace(nb, "class FaultyLeak(BlockManager):", "class FaultyLeak:"),
        lambda nb: _replace(nb, "class FaultyLeak(BlockManager):", "class FaultyLeak(BlockManager, Scheduler):"),
        lambda nb: _replace(nb, "class FaultyTwice(BlockManager):", "class FaultyTwice(FaultyLeak):"),
        lambda nb: _replace(nb, "def pop_idle(self):", "def pop_idler(self):"),
        lambda nb: _replace(nb, "        return 0  # free is free", "        x = 1\n" * 12),
    ],
    carries_its_claims_to_a_verdict: [lambda nb: _set_output(nb, {"text/plain": "claim | A27 | WRONG | 3.26 | not of a museum"})],
}
SPOILT = [
    pytest.param(path, rule, spoil, id=f"{path.stem}-{rule.__name__}-{index}")
    for path, rules in ((PATHS[0], RULES), (BONUS, BONUS_RULES))
    for rule, spoils in rules.items()
    for index, spoil in enumerate(spoils)
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_keeps_the_rule(path: Path, rule: Callable[[NotebookNode], list[str]]) -> None:
    assert rule(read(path)) == []


@pytest.mark.parametrize(("path", "rule", "spoil"), SPOILT)
def test_rule_finds_a_spoilt_notebook(path: Path, rule: Callable[[NotebookNode], list[str]], spoil: Spoil) -> None:
    spoilt = copy.deepcopy(read(path))
    spoil(spoilt)
    assert rule(spoilt)


def test_every_rule_of_this_file_is_tried() -> None:
    functions = ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    rules = [f.name for f in functions if isinstance(f, ast.FunctionDef) and f.returns and ast.unparse(f.returns) == "list[str]"]
    assert sorted(name for name in rules if name != "tags") == sorted(rule.__name__ for rule in RULES)


def test_there_are_notebooks_and_their_files_are_named_as_their_titles_say() -> None:
    assert PATHS[0].stem.startswith("00_") and BONUS in PATHS
    assert [path.stem for path in PATHS if not title_fits(path.stem, read(path).cells[0].source)] == []


@pytest.mark.parametrize(
    ("stem", "title", "fits"),
    [
        ("03_batching", "# 03 · Batching", True),
        ("bonus_bug_museum", "# Bonus · The bug museum", True),
        ("03_batching", "# Bonus · Batching", False),  # a notebook of the course is not excused from its claims by a title
        ("03_batching", "# 04 · Batching", False),
        ("bonus_bug_museum", "# 16 · The bug museum", False),
        ("batching", "# 03 · Batching", False),
        ("extra_batching", "# Extra · Batching", False),
        ("03_batching", "Batching", False),
        ("03_Batching", "# 03 · Batching", False),
        ("bonus", "# Bonus · Batching", False),
    ],
)
def test_a_file_name_and_a_title_say_the_same(stem: str, title: str, fits: bool) -> None:
    assert title_fits(stem, title) is fits


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_is_written_as_jupyter_writes_it(path: Path) -> None:
    """Opening and saving in JupyterLab must not change the file: one space of indent, sorted keys, a newline at the end."""
    text = path.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def test_the_pictures_of_the_readme_are_exported_by_the_notebooks() -> None:
    """Numbered pictures, and those of a bonus, are a notebook's; `make outputs` makes them anew."""
    shown = set(re.findall(r"\(figures/((?:\d\d|bonus)_\w+)\.png\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    exported = {name for path in PATHS for cell in code_cells(read(path)) for name in re.findall(r'export\(\w+, "(\w+)"', cell.source)}
    assert len(shown) >= 3 and shown <= exported
    assert all((ROOT / "figures" / f"{name}.png").stat().st_size > 5_000 for name in exported)
