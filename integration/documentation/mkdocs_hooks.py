"""What MkDocs does to the pages of this site beside its plugins.

- `::: kpe.convert` on an API page is the docstring of that public name, read
  from the source: nothing is imported.
- A notebook of docs/notebooks is a page, with the outputs that are kept in it;
  links of other pages to the notebook lead to that page.
"""

import html
import json
import pathlib
import re

from mkdocs.structure.files import File

PUBLIC_NAME = re.compile(r"^::: kpe\.([\w.]+)$", re.MULTILINE)
NOTEBOOK = re.compile(r"\]\(((?:\.\./)?notebooks/\w+)\.ipynb\)")
BLOCK = """::: keras_policy_ext.{name}
    options:
      heading: "kpe.{name}"
      toc_label: "{last}"
"""


def on_page_markdown(markdown, page, config, files):
    """Replace short forms of public names, and links to notebooks."""
    markdown = NOTEBOOK.sub(r"](\1.md)", markdown)
    return PUBLIC_NAME.sub(as_block, markdown)


def as_block(match):
    name = match[1]
    return BLOCK.format(name=name, last=name.rpartition(".")[2])


def on_files(files, config):
    """Make a page of each notebook, and keep the notebook for download."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            notebook = pathlib.Path(file.abs_src_path)
            files.append(
                File.generated(
                    config,
                    file.src_uri.replace(".ipynb", ".md"),
                    content=page_of(notebook),
                )
            )
    return files


def page_of(path):
    """The Markdown of a notebook."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    parts = [part for cell in cells for part in parts_of(cell)]
    title, *rest = parts
    link = f"[Download this notebook]({path.name})"
    return "\n\n".join([title, link, *rest]) + "\n"


def parts_of(cell):
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            image = "".join(data["image/png"]).replace("\n", "")
            parts.append(f'<img alt="" src="data:image/png;base64,{image}">')
        else:
            text = output.get("text", data.get("text/plain", ""))
            parts.append(
                '<pre class="output">'
                + html.escape("".join(text).rstrip()).replace("\n", "&#10;")
                + "</pre>"
            )
    return parts
