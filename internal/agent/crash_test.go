package agent

func agentProcess([]string) {}
