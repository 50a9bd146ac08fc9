"""`gpuledger agent`: handles signals, then imports and runs `gpuledger_agent.command`."""

from gpuledger.programs import end_on_signals, end_process


def main() -> None:
    """Run the agent until a signal arrives, then end the process."""
    end_on_signals()
    from gpuledger_agent.command import main as run  # noqa: PLC0415  # slow: a signal can arrive meanwhile

    end_process(run())


if __name__ == "__main__":
    main()
