"""Rules of a job: settings that a schedule refuses, ignores or waits for."""
