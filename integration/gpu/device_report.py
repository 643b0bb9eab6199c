"""The page that a run of the device suite writes."""

import benchmark_page


def broken(found):
    """The checks whose promise does not hold, or that ended with an error."""
    return [
        each
        for each in found["checks"]
        if each["verdict"] in ("broken", "error")
    ]


def page(found):
    """A run as Markdown.

    Args:
        found: What `gpu_suite.run` returns.
    """
    where, wrong = found["environment"], broken(found)
    verdict = "all promises hold" if not wrong else f"{len(wrong)} do not hold"
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
    parts = [
        f"# keras-policy-ext on {where['device']}: {verdict}\n",
        f"{where['backend']}; {versions}; {where['date']}.\n",
        "## Promises\n",
        benchmark_page.table(
            ["", "promise", "seen", "s"],
            [
                [
                    each["verdict"],
                    each["claim"],
                    _in_a_cell(each),
                    str(each["seconds"]),
                ]
                for each in found["checks"]
            ],
        ),
    ]
    for each in wrong:
        parts.append(f"### {each['claim']}\n\n```\n{each['seen']}\n```\n")
    parts += ["## Benchmarks\n", *_benchmarks(found)]
    return "\n".join(parts)


def _in_a_cell(outcome):
    seen = outcome["seen"]
    if outcome["verdict"] in ("broken", "error"):
        return "see below"
    if isinstance(seen, dict):
        seen = "; ".join(f"{key}: {value}" for key, value in seen.items())
    return str(seen).replace("|", "\\|").replace("\n", " ")


def _benchmarks(found):
    if "benchmarks_ended" in found:
        yield f"They ended early:\n\n```\n{found['benchmarks_ended']}\n```\n"
    if found["benchmarks"]:
        yield benchmark_page.table_of_rows(found["benchmarks"])
    else:
        yield "None were run.\n"
