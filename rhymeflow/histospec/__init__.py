"""HistoSpec: drafts from earlier responses (RhymeRL, section on HistoSpec)."""
