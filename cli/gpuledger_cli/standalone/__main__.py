"""`gpuledger standalone`: handles signals, then runs `standalone_command`."""

from gpuledger.programs import end_on_signals, end_process


def main() -> None:
    """Run the pipeline until a signal arrives, then end the process."""
    end_on_signals()
    from gpuledger_cli.standalone.standalone_command import main as run  # noqa: PLC0415  # slow: a signal can arrive meanwhile

    end_process(run())


if __name__ == "__main__":
    main()
