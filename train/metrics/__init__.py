"""What a run reports: metrics, events, plots and progress."""
