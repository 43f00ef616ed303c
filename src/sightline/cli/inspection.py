"""`version`, `collect-env` and `capabilities`: what is installed here, and what it can do."""

from __future__ import annotations

import json

import click

from sightline.cli.console import print_distrusted
from sightline.cli.options import json_option
from sightline.version import __version__


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


@click.command()
@json_option
def collect_env(as_json: bool) -> None:
    """Print what a bug report needs to say about this machine."""
    from sightline.runner.environment import collect_environment

    facts = collect_environment()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {value}")


@click.command()
@click.option("--device", help="Whose proofs are told: auto, cpu or cuda; auto without it.")
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Only this one; may be given several times.")
@click.option("--markdown", is_flag=True, help="The page of the documents: Sightline's own backends, as declared.")
@json_option
def capabilities(device: str | None, backends: tuple[str, ...], markdown: bool, as_json: bool) -> None:
    """Print what each attention backend declares, and what of it is proven on this machine."""
    from sightline.attention.backends import registry
    from sightline.attention.proof import ProofBook
    from sightline.core.device import detect_device
    from sightline.core.environment import proof_folder
    from sightline.diagnose.capabilities import capability_matrix, capability_page

    if markdown:
        others = {"--device": device is not None, "--backend": bool(backends), "--json": as_json}
        given = [name for name, is_given in others.items() if is_given]
        if given:
            raise click.UsageError(
                f"expected --markdown alone, got {', '.join(given)} too: the page has all of Sightline's own backends, "
                "as declared"
            )
        click.echo(capability_page(registry.BUILT_IN), nl=False)
        return
    book, installed = ProofBook(proof_folder()), registry.installed()
    chosen = tuple(registry.find(name, installed) for name in backends) or installed
    matrix = capability_matrix(chosen, detect_device(device or "auto"), book)
    print_distrusted(book)
    click.echo(json.dumps(matrix.to_data(), indent=2) if as_json else "\n".join(matrix.lines()))
