"""HistoSpec: drafts from what prompts produced before (RhymeRL, section on HistoSpec)."""
