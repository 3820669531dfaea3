"""What readers are told: records with the field names of CONTRACT, without torch and the orchestrator."""
